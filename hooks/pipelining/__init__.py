"""Compression between the stages of `torch.distributed.pipelining`."""
