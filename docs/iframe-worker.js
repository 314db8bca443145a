// Search runs in a Worker, which browsers refuse to pages opened from disk. There it runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      const frame = this.frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      addEventListener("message", this.heard = ({ source, data }) => {
        if (source !== frame.contentWindow) return
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      })
      const text = `postMessage = parent.postMessage.bind(parent)
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          document.body.append(script)
        })), Promise.resolve())`
      frame.contentDocument.open()
      frame.contentDocument.write(`<body><script>${text}</scr` + `ipt><script src="${url}"></scr` + `ipt></body>`)
      this.ready = new Promise(done => { frame.contentWindow.onload = done })
      frame.contentDocument.close()
    }
    postMessage(message) { this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: message }))) }
    terminate() {
      removeEventListener("message", this.heard)
      this.frame.remove()
    }
  }
