"""N hosts on one Linux machine, connected by links of a given rate: a network to test the collectives on.

A host is a network namespace with one interface, eth0: a veth pair whose other end is a port of a bridge in a
namespace of its own. The root namespace gets no interface, address or route; the hosts reach only each other,
at 10.77.0.1 and up. `tc ... tbf` shapes a link both ways: egress at eth0, and egress at the bridge's port.

Measured on 2 cores, one TCP flow, 50 Mbit/s to 10 Gbit/s: 95.6 % of the rate is payload; headers are the
rest, as tbf counts 1514 bytes for 1448 of payload. The burst, which an idle link lets through at once, is
64 KiB (one GSO packet) and 0.5 ms at the rate: without the latter 10 Gbit/s falls to 3. The queue holds 20
ms, at least 1 MiB. TCP runs reno, which every kernel has, whatever the machine's default.

Where links have a round trip the hosts are not on the bridge: a router (perf.lab.router) hands on what comes out of
each link to the one that it goes to, half the round trip later, for few kernels have netem. Queues then hold a round
trip, and TCP's buffers may grow to 64 MiB: the sender keeps rate times round trip until it is acknowledged. Round trips
and rates are measured when such a link is set, and one that is not within 10 % of what was asked is refused: see
perf.lab.delay.

`bytes_sent` reads eth0's tx_bytes: payload and headers, where a GSO packet of up to 64 KiB counts one header.
IPv6 is off on eth0, so that an idle link stays silent.

With each=4 a host is a node of four ranks. What they send each other goes to the host's own address, which the kernel
routes over the loopback: it passes neither the shaped link nor its counter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perf.lab import link_check
from perf.lab.delay import DelayingRouter, WrongLink, check_rates, reach_round_trip
from perf.lab.link_check import Host
from perf.lab.namespaces import (
    LabUnavailable,
    check_available,
    execute,
    new_prefix,
    remove,
    signal_all,
    sweep_stale,
)
from perf.lab.processes import OnLine, Rank, Run, exit_on, held_signals, rank_variables, set_handlers
from perf.lab.rates import UNSHAPED, parse_link, rate_bits, rtt_seconds

INTERFACE = "eth0"
MOST_EACH = 64
TUNE = """echo reno > /proc/sys/net/ipv4/tcp_congestion_control
f=/proc/sys/net/ipv6/conf/default/disable_ipv6; [ ! -e $f ] || echo 1 > $f"""
BUFFERS = ("tcp_rmem", "tcp_wmem")  # least, first and most bytes of a connection
MOST_BUFFER = 64 << 20

log = logging.getLogger("perf.lab")


class NetworkLab:
    """Namespaces joined by links of a rate, and of a round trip; a context manager that removes them again."""

    def __init__(self, hosts: int = 4, link: str = UNSHAPED, each: int = 1) -> None:
        """link: of every host, both ways, as records have it ("1gbit", "100mbit+50ms"). each: ranks a host."""
        if not 2 <= hosts <= 64:
            raise ValueError(f"hosts is {hosts}: a network lab has 2 to 64 hosts")
        if not 1 <= each <= MOST_EACH:
            raise ValueError(f"each is {each}: a host of a network lab has 1 to {MOST_EACH} ranks")
        prefix = new_prefix()
        self.hosts, self.each = hosts, each
        self.bridge = f"{prefix}-bridge"
        self.namespaces = [f"{prefix}-host{host}" for host in range(hosts)]
        self.link = parse_link(link)
        self._router: DelayingRouter | None = None
        self._buffers: list[str] = []  # of TCP, before there was a delay
        self._former: dict[int, Any] = {}
        self._run: Run | None = None
        self._runs = 0

    def __enter__(self) -> NetworkLab:
        check_available()
        defaults = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
        self._former = set_handlers(dict.fromkeys(defaults, exit_on))
        atexit.register(self.close)  # should a second Ctrl-C cut __exit__ short
        try:
            with held_signals():
                self._build()
            self.set_link(self.link)
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError) or isinstance(error, WrongLink):
                raise
            raise LabUnavailable(
                f"the network lab could not be set up, {error}: run it as root, on a kernel with network "
                "namespaces, veth, bridge and sch_tbf (in a container, with --privileged)"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; a signal that arrives meanwhile waits."""
        try:
            with held_signals(), contextlib.ExitStack() as last:
                last.callback(atexit.unregister, self.close)
                last.callback(remove, [self.bridge, *self.namespaces])
                last.callback(self._stop_router)
                if self._run is not None:
                    self._run.stop()
        finally:
            set_handlers(self._former)

    def run(self, argv: Sequence[str], timeout: float = 600, check: bool = True, **options: Any) -> list[Rank]:
        """`start`, with its options, then `Run.wait`."""
        return self.start(argv, **options).wait(timeout, check)

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, on_line: OnLine | None = None) -> Run:
        """Start `python argv` (a script, or "-m" and a module; arguments) with torchrun's variables, `each` on a host.

        Rank k is on host k // each. `on_line(rank, line)` gets output as it comes.
        """
        if self._run is not None and self._run.running():
            raise RuntimeError("a run is still on these hosts: call its wait() or stop() first")
        self._runs += 1
        variables = [self._variables(rank, env or {}) for rank in range(self.hosts * self.each)]
        with held_signals():
            namespaces = [self.namespaces[rank // self.each] for rank in range(len(variables))]
            commands = [["ip", "netns", "exec", name, sys.executable, *argv] for name in namespaces]

            def signal_hosts(ranks: Sequence[Rank], number: int) -> None:
                signal_all(self.namespaces, number)

            self._run = Run(commands, variables, on_line, self._check_router, signal_hosts)
        return self._run

    def address(self, host: int) -> str:
        return f"10.77.0.{self._checked(host) + 1}"

    def bytes_sent(self) -> list[int]:
        """Bytes each host has sent since the lab was built, from its interface's own counter."""
        show = ("-s", "-j", "link", "show", "dev", INTERFACE)
        links = [json.loads(execute("ip", "-n", name, *show))[0] for name in self.namespaces]
        return [int(link["stats64"]["tx"]["bytes"]) for link in links]

    def set_link(self, link: str) -> None:
        """Every link anew, while no run is on the hosts.

        WrongLink where there is a round trip, and it or the rate is not what was asked.
        """
        former, self.link = self.link, parse_link(link)
        if rate_bits(former) is not None or rate_bits(self.link) is not None:
            self._shape()
        if rtt_seconds(self.link) is not None:
            self._start_delay()
        elif self._router is not None:
            self._end_delay()

    def link_down(self, host: int) -> None:
        """Pull the host's cable: its packets are lost without an error, no connection is closed."""
        execute("ip", "-n", self.bridge, "link", "set", f"host{self._checked(host)}", "down")

    def link_up(self, host: int) -> None:
        """Plug the host's cable in again; TCP goes on at its next retransmission."""
        execute("ip", "-n", self.bridge, "link", "set", f"host{self._checked(host)}", "up")

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host is {host}: this lab's hosts are 0 to {self.hosts - 1}")
        return host

    def _variables(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Environment variables of a rank's process."""
        master = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(29500 + self._runs % 1000)}
        return {**rank_variables(rank, self.hosts, self.each, INTERFACE, self.bridge), **master, **env}

    def _build(self) -> None:
        began, logged = time.monotonic(), False
        for name in sweep_stale():
            log.info("removed %s, left by a lab that was killed", name)
        execute("ip", "-batch", "-", lines=[f"netns add {name}" for name in (self.bridge, *self.namespaces)])
        for name in (self.bridge, *self.namespaces):
            execute("ip", "netns", "exec", name, "sh", "-ec", TUNE)
        links = ["link set lo up", "link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for host, name in enumerate(self.namespaces):
            links.append(f"link add host{host} type veth peer name {INTERFACE} netns {name}")
            links.append(f"link set host{host} master br0 up")
        execute("ip", "-n", self.bridge, "-batch", "-", lines=links)
        for host, name in enumerate(self.namespaces):
            up = [
                "link set lo up",
                f"addr add {self.address(host)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            execute("ip", "-n", name, "-batch", "-", lines=up)
            if not logged and time.monotonic() - began > 1:
                logged = True
                log.info("setting up %d hosts ...", self.hosts)

    def _start_delay(self) -> None:
        """Take the hosts off the bridge and put the router between them; check what links they have then."""
        if self._router is None:
            with held_signals():
                self._set_ports("nomaster")
                self._buffers = [self._read_buffers(each) for each in BUFFERS]
                self._set_buffers([f"{each.rpartition(' ')[0]} {MOST_BUFFER}" for each in self._buffers])
                self._router = DelayingRouter(self.bridge, [f"host{host}" for host in range(self.hosts)])
        self._check_links()

    def _end_delay(self) -> None:
        with held_signals():
            self._stop_router()
            self._set_buffers(self._buffers)
            self._set_ports("master br0")

    def _set_ports(self, what: str) -> None:
        lines = [f"link set host{host} {what}" for host in range(self.hosts)]
        execute("ip", "-n", self.bridge, "-batch", "-", lines=lines)

    def _read_buffers(self, name: str) -> str:
        return " ".join(execute("ip", "netns", "exec", self.namespaces[0], "cat", f"/proc/sys/net/ipv4/{name}").split())

    def _set_buffers(self, values: Sequence[str]) -> None:
        lines = [f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in zip(BUFFERS, values, strict=True)]
        for name in self.namespaces:
            execute("ip", "netns", "exec", name, "sh", "-ec", "\n".join(lines))

    def _stop_router(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            router.stop()

    def _check_router(self) -> None:
        """Check that the router runs while ranks do: without it no link carries anything."""
        if self._router is not None and self._router.ended is not None:
            raise WrongLink(f"the delaying router ended with status {self._router.ended}: its links are gone")

    def _check_links(self) -> None:
        rtt, bits = rtt_seconds(self.link), rate_bits(self.link)
        assert self._router is not None and rtt is not None
        hosts = [Host(name, self.address(host)) for host, name in enumerate(self.namespaces)]
        pings = max(5, min(25, round(0.25 / rtt)))
        try:
            reach_round_trip(rtt, self._router.set_delay, lambda: link_check.round_trips(hosts, pings))
            if bits is not None:
                bursts = 2**21 / bits  # seconds of what the shapers let through at once, twice
                check_rates(bits, lambda: link_check.rates(hosts, 0.1 + 15 * rtt + bursts, 0.3 + 2 * rtt + bursts))
        except OSError as error:
            self._check_router()
            raise WrongLink(f"the lab's hosts do not reach each other: {error}") from error

    def _shape(self) -> None:
        command, bits = "qdisc del dev {} root", rate_bits(self.link)
        if bits is not None:
            burst = 65536 + bits // 8 // 2000  # bytes: a GSO packet, 0.5 ms
            queue = max(rtt_seconds(self.link) or 0.0, 0.02)  # seconds
            limit = burst + max(round(bits / 8 * queue), 1 << 20)  # bytes
            command = f"qdisc replace dev {{}} root tbf rate {bits}bit burst {burst}b limit {limit}b"
        ports = [command.format(f"host{host}") for host in range(self.hosts)]
        execute("tc", "-n", self.bridge, "-batch", "-", lines=ports)
        for name in self.namespaces:
            execute("tc", "-n", name, "-batch", "-", lines=[command.format(INTERFACE)])
