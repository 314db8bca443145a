// LD_PRELOAD: a token bucket around what a process sends over TCP, and a count of it. GRADWIRE_BUCKET names a file of
// two numbers: bytes a second (double; 0: no limit), and bytes sent (uint64). A link that was idle has nothing saved: no
// message goes faster than the rate, and only small ones pass at once. `links.BucketLinks` preloads it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SMALL 256        // bytes of messages that pass unseen: words of a protocol
#define LEAST 4096       // bytes, or QUANTUM seconds of the link, that one call sends at least
#define QUANTUM 100e-6
#define IDLE 1e-3        // seconds without a send after which the link was idle, and has nothing saved
#define LATE 8e-3        // seconds of the link that a process which wanted to send, and woke late, makes up for
#define PIECES 64        // of one message

static volatile struct { double rate; unsigned long long sent; } *bucket;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double budget, last;
static int waiting;
static __thread int exact;
static ssize_t (*real_send)(int, const void *, size_t, int);
static ssize_t (*real_sendmsg)(int, const struct msghdr *, int);
static ssize_t (*real_writev)(int, const struct iovec *, int);

__attribute__((constructor)) static void begin(void) {
  real_send = dlsym(RTLD_NEXT, "send");
  real_sendmsg = dlsym(RTLD_NEXT, "sendmsg");
  real_writev = dlsym(RTLD_NEXT, "writev");
  const char *name = getenv("GRADWIRE_BUCKET");
  int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *memory = mmap(0, sizeof *bucket, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) bucket = memory;
  close(file);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// How many of `want` bytes may go now; 0: none.
static size_t take(size_t want) {
  double rate = bucket->rate, most = 0, need = rate * QUANTUM > LEAST ? rate * QUANTUM : LEAST;
  if (rate <= 0) return want;
  if (need > want) need = want;
  pthread_mutex_lock(&lock);
  double t = now();
  if (waiting || t - last < IDLE) most = rate * LATE;
  if (most < need && waiting) most = need;
  budget += last ? (t - last) * rate : 0;
  if (budget > most) budget = most;
  last = t;
  size_t may = budget < need ? 0 : budget < want ? (size_t)budget : want;
  budget -= may;
  waiting = may < want;
  pthread_mutex_unlock(&lock);
  return may;
}

// As `take`, once there is something; 0 with EAGAIN, as from a full socket, where the caller does not wait.
static size_t await(int file, size_t want, int flags) {
  for (;;) {
    size_t may = take(want);
    if (may) return may;
    if (!exact) exact = !prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    usleep(20);  // also where the caller does not wait: it would ask again at once
    if (flags & MSG_DONTWAIT || fcntl(file, F_GETFL) & O_NONBLOCK) {
      may = take(want);
      if (!may) errno = EAGAIN;
      return may;
    }
  }
}

static int passes(int file, size_t size) {
  int domain = 0, before = errno;
  socklen_t length = sizeof domain;
  if (!bucket || size < SMALL) return 1;
  int failed = getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &length);
  errno = before;
  return failed || (domain != AF_INET && domain != AF_INET6);
}

static size_t total(const struct msghdr *message) {
  size_t size = 0;
  for (size_t i = 0; i < message->msg_iovlen; i++) size += message->msg_iov[i].iov_len;
  return size;
}

// As much of a message as may go.
static ssize_t limited(int file, const struct msghdr *message, int flags) {
  struct iovec pieces[PIECES];
  struct msghdr part = *message;
  size_t may = await(file, total(message), flags), left = may, kept = 0;
  if (!may) return -1;
  for (; kept < message->msg_iovlen && kept < PIECES && left; kept++) {
    pieces[kept] = message->msg_iov[kept];
    if (pieces[kept].iov_len > left) pieces[kept].iov_len = left;
    left -= pieces[kept].iov_len;
  }
  part.msg_iov = pieces;
  part.msg_iovlen = kept;
  ssize_t sent = real_sendmsg(file, &part, flags);
  size_t went = sent < 0 ? 0 : (size_t)sent;
  pthread_mutex_lock(&lock);
  budget += may - went;
  bucket->sent += went;
  pthread_mutex_unlock(&lock);
  return sent;
}

ssize_t send(int file, const void *data, size_t size, int flags) {
  struct iovec piece = {(void *)data, size};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
  return passes(file, size) ? real_send(file, data, size, flags) : limited(file, &message, flags);
}

ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
  return passes(file, total(message)) ? real_sendmsg(file, message, flags) : limited(file, message, flags);
}

ssize_t writev(int file, const struct iovec *pieces, int count) {
  struct msghdr message = {.msg_iov = (struct iovec *)pieces, .msg_iovlen = (size_t)count};
  return passes(file, total(&message)) ? real_writev(file, pieces, count) : limited(file, &message, 0);
}
