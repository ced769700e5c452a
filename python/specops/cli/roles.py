# SPDX-License-Identifier: Apache-2.0
"""Command-line options of several engines or servers that serve one model together."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from specops.cli import byte_size, finite, shown_bytes
from specops.cli.options import PROCESSES, group
from specops.cli.sessions import session_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specops.service.client import EngineClient
    from specops.service.wire import KvEventSettings, Peer, RoleSettings, Setup

# Titles of groups of options, as in the table of docs/server.md.
ROLE = "prefill and decode apart"
EVENTS = "events of the prefix cache"
QUEUE = "a queue in Redis"
ROLES = ("prefill", "decode", "mixed")
_REDIS_SECONDS = 5.0  # timeout of an answer from Redis
_LOOPBACK = ["127.0.0.1", "localhost", "::1"]
_PEER_FORM = "HOST:PORT or HOST:FIRST-LAST, the other server's --kv-host and --kv-port"


# Option -> options that have no effect without it.
_NEEDS = {
    "role": (
        "kv_transport",
        "kv_host",
        "kv_port",
        "kv_peers",
        "kv_lease_seconds",
        "kv_lease_bytes",
    ),
    "session_dir": ("session_bytes",),
    "scheduler_name": (
        "scheduler_host",
        "scheduler_port",
        "scheduler_password",
        "scheduler_topic",
        "scheduler_ttl",
    ),
}


def require_effect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that have no effect without another one, unless they are at their defaults.

    Raises:
        ValueError: an option has no effect.
    """
    for needed, names in _NEEDS.items():
        if getattr(args, needed) != parser.get_default(needed):
            continue
        for name in names:
            if getattr(args, name) != parser.get_default(name):
                value = " splitwise" if needed == "scheduler_name" else ""
                raise ValueError(f"{name} has no effect without {needed}{value}")


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of disaggregated prefill and decoding: role, KV transfer and leases."""
    add = group(parser, ROLE).add_argument
    add(
        "--role",
        "--splitwise-role",
        type=str.lower,
        choices=ROLES,
        help="compute prompts for other servers (prefill), decode after prompts of other servers "
        "(decode), or both (mixed), as kv_transfer_params of requests specify (default: "
        "neither)",
    )
    add(
        "--kv-transport",
        type=str.lower,
        choices=("tcp", "nixl"),
        default="tcp",
        help="transport of KV pages, equal on all servers: TCP, or NIXL with UCX for RDMA "
        "networks (requires specops[nixl]; default: %(default)s)",
    )
    add(
        "--kv-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address at which this server offers KV pages, neither encrypted nor authenticated, "
        "to servers that list it in --kv-peers (default: %(default)s)",
    )
    add(
        "--kv-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of --kv-host; further ranks and engines use the ports after it (default: free "
        "ports)",
    )
    add(
        "--kv-peers",
        metavar="HOST:PORT[-LAST][,..]",
        action="append",
        default=[],
        help="addresses from which KV pages may be fetched: --kv-host and --kv-port of servers "
        "that compute prompts, with a range of ports for several ranks or engines; may be "
        "repeated; required by --role decode. If servers exchange their ports "
        "(--scheduler-name splitwise, Dynamo), a HOST alone allows all its ports (default "
        "then: loopback addresses)",
    )
    add(
        "--kv-lease-seconds",
        type=finite,
        default=120.0,
        metavar="SECONDS",
        help="time for which KV pages are held for their reader (default: %(default)g)",
    )
    add(
        "--kv-lease-bytes",
        type=byte_size,
        default=1 << 30,
        metavar="SIZE",
        help="maximum total size of held KV pages; the oldest are dropped (default: "
        f"{shown_bytes(1 << 30)})",
    )


def role_settings(
    args: argparse.Namespace, *, clients_name_peers: bool = True
) -> "RoleSettings | None":
    """Return the settings of the role; None if there is no role.

    Args:
        args: the parsed command line.
        clients_name_peers: whether clients' requests name the server that holds the pages.
            Otherwise servers exchange addresses themselves.

    Raises:
        ModuleNotFoundError: a package that the server needs is not installed.
        ValueError: an option is out of range, or requires another one.
    """
    if args.role is None:
        return None
    if args.in_process:
        raise ValueError("role requires an engine in its own process; remove --in-process")
    # The ranks of all engines listen on consecutive ports.
    limit = 65536 - (args.tensor_parallel_size or 1) * args.data_parallel_size
    if not 0 <= args.kv_port <= limit:
        raise ValueError(f"kv_port must be in [0, {limit}], got {args.kv_port}")
    if not 0 < args.kv_lease_seconds < math.inf:
        raise ValueError(f"kv_lease_seconds must be above 0, got {args.kv_lease_seconds}")
    if args.kv_lease_bytes < 0:
        raise ValueError(f"kv_lease_bytes must be at least 0, got {args.kv_lease_bytes}")
    peers = _peers(args.kv_peers or ([] if clients_name_peers else _LOOPBACK), clients_name_peers)
    if clients_name_peers and args.role == "decode" and not peers:
        raise ValueError(f"role decode requires kv_peers ({_PEER_FORM}), got none")
    if args.kv_transport == "nixl":
        try:
            import nixl  # noqa: F401  (the engine's process needs it; reported here if missing)
        except ModuleNotFoundError:
            raise
        except ImportError as error:  # nixl's library for the CUDA version is missing
            raise ValueError(f"kv_transport nixl cannot be used: {error}") from None

    from specops.service.wire import RoleSettings

    return RoleSettings(
        args.role,
        args.kv_host,
        args.kv_port,
        peers,
        args.kv_lease_seconds,
        args.kv_lease_bytes,
        args.kv_transport,
    )


def _peers(addresses: "Iterable[str]", are_ports_needed: bool) -> "list[Peer]":
    """Return the addresses of `--kv-peers`.

    Raises:
        ValueError: an address is malformed, or lacks a required port.
    """
    from specops.service.wire import Peer

    peers = []
    for address in (text.strip() for texts in addresses for text in texts.split(",")):
        try:
            host, ports = _host_and_ports(address)
            first, last = ports or (1, 65535)
            if not host or not 1 <= first <= last <= 65535 or (are_ports_needed and not ports):
                raise ValueError
        except ValueError:
            other = "" if are_ports_needed else "HOST or "
            raise ValueError(f"kv_peers must be {other}{_PEER_FORM}, got {address!r}") from None
        peers.append(Peer(host, first, last))
    return peers


def _host_and_ports(text: str) -> tuple[str, tuple[int, int] | None]:
    """Split an address into its host and its range of ports, if it has one.

    An IPv6 address with ports is in brackets.

    Raises:
        ValueError: the text after the last colon is not a number or a range.
    """
    is_bare = text.count(":") > 1 and not text.startswith("[")
    host, colon, ports = (text, "", "") if is_bare or text.endswith("]") else text.rpartition(":")
    if not colon:
        return (host or ports).strip("[]"), None
    first, dash, last = ports.partition("-")
    return host.strip("[]"), (int(first), int(last if dash else first))


def add_data_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Add the option for several engines behind one frontend."""
    group(parser, PROCESSES).add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="number of engines of this server, each with the whole model and in its own process; "
        "a request runs on one of them (default: %(default)s)",
    )


def setups(args: argparse.Namespace, settings: dict[str, Any]) -> "list[Setup]":
    """Return the setup of every engine process; an empty list with `--in-process`.

    Args:
        args: the parsed command line.
        settings: settings of an engine, as `EngineConfig.from_plain` takes them.

    Raises:
        ModuleNotFoundError: a package that the server needs is not installed.
        ValueError: an option is out of range, or requires another one.
    """
    is_queue = args.scheduler_name == "splitwise"
    role = role_settings(args, clients_name_peers=not is_queue)
    events = kv_event_settings(args)
    sessions = session_settings(args)
    size = args.data_parallel_size
    if size < 1:
        raise ValueError(f"data_parallel_size must be at least 1, got {size}")
    if args.in_process:
        if size > 1:
            raise ValueError(f"data_parallel_size must be 1 with --in-process, got {size}")
        return []
    from specops.service.wire import Setup

    if size == 1:
        return [
            Setup(
                settings,
                args.log_level,
                role=role,
                kv_events=events,
                log_format=args.log_format,
                sessions=sessions,
            )
        ]
    if args.scheduler_name != "local":
        raise ValueError(f"data_parallel_size must be 1 with scheduler_name splitwise, got {size}")
    if settings.get("suffix_cache") is not None:
        raise ValueError(
            f"suffix_cache must be absent with several engines, got data_parallel_size {size}"
        )
    if settings.get("device", "auto").startswith("cuda:"):
        raise ValueError(
            f"device must be auto, cpu or cuda with several engines, got {settings['device']}"
        )
    if settings.get("num_threads") is None:
        from specops import get_num_threads

        settings = {**settings, "num_threads": max(get_num_threads() // size, 1)}
    ranks = args.tensor_parallel_size or 1
    return [
        Setup(
            settings,
            args.log_level,
            role=_role_behind(role, rank * ranks),
            kv_events=_events_behind(events, rank),
            data_parallel_rank=rank,
            log_format=args.log_format,
            sessions=sessions,
        )
        for rank in range(size)
    ]


def _role_behind(role: "RoleSettings | None", offset: int) -> "RoleSettings | None":
    """Return the role settings of a further engine, with the port shifted by `offset`."""
    if role is None or not role.port:
        return role
    from msgspec import structs

    return structs.replace(role, port=role.port + offset)


def _events_behind(events: "KvEventSettings | None", offset: int) -> "KvEventSettings | None":
    """Return the event settings of a further engine, with ports shifted by `offset` as in vLLM.

    Raises:
        ValueError: an endpoint has no port.
    """
    if events is None:
        return None
    from msgspec import structs

    changed = {}
    for name in ("endpoint", "replay"):
        start, colon, port = getattr(events, name).rpartition(":")
        if getattr(events, name) and not port.isdecimal():
            raise ValueError(
                f"kv_events_{name} must end with a port if there are several engines, got "
                f"{getattr(events, name)}"
            )
        changed[name] = f"{start}{colon}{int(port) + offset}" if port else ""
    return structs.replace(events, **changed)


def add_kv_event_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that publish the prefix cache's contents to routers."""
    add = group(parser, EVENTS).add_argument
    add(
        "--kv-events-endpoint",
        metavar="ENDPOINT",
        help="ZeroMQ endpoint on which to publish changes of the prefix cache in vLLM's format, "
        "such as tcp://127.0.0.1:5557 (default: none)",
    )
    add(
        "--kv-events-topic",
        default="",
        metavar="TOPIC",
        help="topic of the messages of --kv-events-endpoint (default: empty)",
    )
    add(
        "--kv-events-replay",
        default="",
        metavar="ENDPOINT",
        help="ZeroMQ endpoint at which subscribers can request messages that they missed "
        "(default: none)",
    )


def kv_event_settings(args: argparse.Namespace) -> "KvEventSettings | None":
    """Return the settings of KV events; None if none are published.

    Raises:
        ModuleNotFoundError: pyzmq is not installed, or a package that the server needs.
        ValueError: an option requires another one.
    """
    if args.kv_events_endpoint is None:
        for name in ("kv_events_topic", "kv_events_replay"):
            if getattr(args, name):
                raise ValueError(f"{name} has no effect without kv_events_endpoint")
        return None
    if args.in_process:
        raise ValueError(
            "kv_events_endpoint requires an engine in its own process; remove --in-process"
        )
    import zmq  # noqa: F401  (the engine's process needs it; reported here if missing)

    from specops.service.wire import KvEventSettings

    return KvEventSettings(args.kv_events_endpoint, args.kv_events_topic, args.kv_events_replay)


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a job queue that several servers share."""
    add = group(parser, QUEUE).add_argument
    add(
        "--scheduler-name",
        type=str.lower,
        choices=("local", "splitwise"),
        default="local",
        help="engines that run the requests of this server: its own (local), or those of all "
        "servers with the same Redis, topic and model (splitwise; default: local)",
    )
    add(
        "--scheduler-host",
        default="127.0.0.1",
        metavar="HOST",
        help="host on which Redis listens (default: %(default)s)",
    )
    add(
        "--scheduler-port",
        type=int,
        default=6379,
        metavar="PORT",
        help="port on which Redis listens (default: %(default)s)",
    )
    add("--scheduler-password", metavar="PASSWORD", help="password for Redis (default: none)")
    add(
        "--scheduler-topic",
        default="specops",
        metavar="TOPIC",
        help="prefix of keys in Redis (default: %(default)s)",
    )
    add(
        "--scheduler-ttl",
        type=int,
        default=900,
        metavar="SECONDS",
        help="time after which a request without an answer fails (default: %(default)s)",
    )


def check_scheduler(args: argparse.Namespace) -> None:
    """Check the options of the scheduler, and that its Redis answers.

    Args:
        args: the parsed command line.

    Raises:
        ModuleNotFoundError: redis is not installed.
        ValueError: an option is out of range, there is no role, or Redis does not answer.
    """
    if args.scheduler_name == "local":
        return
    if args.role is None:
        raise ValueError("scheduler_name splitwise requires a role; set --role")
    if args.scheduler_ttl < 1:
        raise ValueError(f"scheduler_ttl must be at least 1, got {args.scheduler_ttl}")
    if not 0 < args.scheduler_port < 1 << 16:
        raise ValueError(f"scheduler_port must be in [1, 65535], got {args.scheduler_port}")
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, RedisError, ResponseError
    from redis.retry import Retry

    where = f"{args.scheduler_host}:{args.scheduler_port}"
    client = Redis(**_redis_options(args), retry=Retry(NoBackoff(), 0))
    try:
        client.info("server")
    except (AuthenticationError, ResponseError) as error:
        raise ValueError(
            f"scheduler_password must be the password of the Redis at {where}, got "
            f"{'a wrong one' if args.scheduler_password else 'none'}: {error}"
        ) from None
    except (RedisError, OSError) as error:
        raise ValueError(
            "scheduler_host and scheduler_port must be the address of a running Redis, got "
            f"{where}: {error}"
        ) from None
    finally:
        client.close()


def _redis_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of a connection to Redis."""
    return {
        "host": args.scheduler_host,
        "port": args.scheduler_port,
        "password": args.scheduler_password,
        "socket_connect_timeout": 2.0,
        "socket_timeout": _REDIS_SECONDS,
    }


def scheduled(args: argparse.Namespace, client: "EngineClient") -> "EngineClient":
    """Return a client that runs requests by the chosen scheduler.

    Args:
        args: the parsed command line, checked by `check_scheduler`.
        client: client of this server's engine.
    """
    if args.scheduler_name == "local":
        return client
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    from specops.disaggregated.splitwise import SplitwiseClient

    def connect() -> Redis:
        # No retries here: SplitwiseClient reconnects itself.
        return Redis(**_redis_options(args), retry=Retry(NoBackoff(), 0))

    return SplitwiseClient(
        client,
        role=args.role,
        topic=args.scheduler_topic,
        ttl=args.scheduler_ttl,
        connect=connect,
    )
