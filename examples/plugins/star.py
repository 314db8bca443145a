"""An exchange: wires to the first rank, their mean to all. Call `register_exchange(Star)` on every rank."""

import torch
from gradwire import plugin as gw


class Star(gw.Exchange):
    """It receives P·w bytes at the first rank, and 4·N at each of the others; w is the size of a wire."""

    name = "star"

    def __init__(self, codec: gw.Codec, numel: int, extra: int, device: torch.device, group: gw.Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.size, first, others = codec.wire_bytes(numel) if numel else 0, self.rank == 0, self.world_size - 1
        self.row = self.bytes(self.size + 4 * extra)  # the wire, and behind it what travels uncompressed
        self.rows = self.bytes(self.world_size * len(self.row)).view(self.world_size, -1)
        self.mean = torch.zeros(numel + extra, device=device)
        nothing, none = [self.row[:0]] * self.world_size, [self.mean[:0]] * self.world_size
        # Messages from each rank, and to each: alike in every step, so that receives are posted ahead.
        received, told = list(self.rows) if first else nothing, none if first else [self.mean, *none[1:]]
        self.to_first = gw.PersistentMessage(self._own_group("in"), received, [self.row, *nothing[1:]])
        to_each = [none[0], *[self.mean] * others] if first else none
        self.to_all = gw.PersistentMessage(self._own_group("out"), told, to_each)
        self.ports = [self.to_first, self.to_all]
        if numel:
            self.workspaces.append(codec.workspace(numel, device))

    @classmethod
    def carries(cls, codec: gw.Codec) -> bool:
        return len(codec.part_bytes(1)) == 1

    @classmethod
    def estimate(cls, network: gw.Calibration, what: gw.BucketSpec) -> gw.Estimate:
        line, numel, ranks = network.all_to_all, what.numel, what.world_size
        moves = [(line, ranks * what.codec.wire_bytes(numel)), (line, 4 * numel)]
        return network.estimate(cls.name, moves, what.speed.encode * numel, what.speed.decode * ranks * numel)

    @property
    def bytes_sent(self) -> int:
        return len(self.row)

    @property
    def bytes_received(self) -> int:
        return 4 * len(self.mean)

    def reduce(self, x: gw.ExchangeArgs) -> gw.Stages:
        wire, extra = self.row.split([self.size, 4 * self.extra])
        if self.numel:
            x.feedback.encode(self.codec, x.grad, wire, x.draw, self.workspaces[1])
        extra.view(torch.float32).copy_(x.extra)
        yield self.to_first.start()  # the pipeline goes on here when the messages have arrived
        if self.rank == 0:
            if self.numel:
                self.codec.decode_mean((self.rows[:, : self.size],), self.mean[: self.numel], self.workspaces[1])
            self._decode_extra(self.rows[:, self.size :], self.mean[self.numel :])
        yield self.to_all.start()
        x.out.copy_(self.mean[: self.numel])
        x.extra.copy_(self.mean[self.numel :])
