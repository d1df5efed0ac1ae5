"""What it costs to move an episode from a producer to the learner, exactly once, against raw Redis Streams.

Episodes of 8 turns of 200 tokens (`transport_episode.py`) in groups of 8, 32 at a time. Producer and consumer are
processes of their own; the server is the embedded Valkey on a unix socket with its append-only file. A figure is the
CPU time of all three per episode, the server's from /proc. Systems take turns, round by round.

- `redis streams`: the floor. XADD in pipelines of 32, XREADGROUP with count 32, XACK and XDEL of the 32. It refuses,
  orders, counts and fences nothing.
- `headrace`: the product's ledger, with every check that it makes. Four groups are admitted and put together, four are
  leased, a version is staged, committed and settled; every 32nd time the fates are read, as the driver does.
- `headrace, hash and gate`: the same, and each payload is hashed on both sides and compared, and passes the fidelity
  gate. These judge episodes, not their transport, and the floor could call them too; so they are rows of their own.

Both systems encode and decode the same records with the same codec. The ratio is `headrace` over the floor; the one
with hash and gate is given beside it as `ratio_with_hash_and_gate`.

Encode and decode are compared with memcpy in `transport_episode.py`, flatness is measured in `transport_flat.py`.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import redis
from common import Row, result, row_of, table
from transport_episode import RAW_BYTES, part_costs, payload_bytes
from transport_flat import Flatness, measure_flatness
from transport_systems import Floor, Product, run_round

from headrace import __version__
from headrace.platform.ledger.server import EmbeddedServer

TARGET, CODEC_TARGET, FLAT_TARGET = 1.3, 8.0, 1.3
UNIT = "us CPU per episode"
FLOOR, LEDGER, JUDGED = "redis streams", "headrace", "headrace, hash and gate"


def transport_costs(server: EmbeddedServer, repeats: int, episodes: int) -> dict[str, list[dict[str, float]]]:
    """Per system and round: microseconds of CPU per episode of producer, consumer, server, and their sum."""
    systems = {FLOOR: Floor(), LEDGER: Product(judges=False), JUDGED: Product(judges=True)}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for repeat in range(repeats + 1):
        for name, system in systems.items():
            cost = run_round(system, server, episodes)
            if repeat:  # the first one warms up
                costs[name].append(cost)
    return costs


def transport_rows(costs: dict[str, list[dict[str, float]]], server_version: str) -> list[Row]:
    """One row per system, with the parts that add up to its figure."""
    rows = []
    for name, rounds in costs.items():
        parts = {part: round(statistics.median(cost[part] for cost in rounds), 1) for part in rounds[0]}
        parts.pop("sum")
        version = server_version if name == FLOOR else __version__
        rows.append(row_of(name, version, UNIT, [cost["sum"] for cost in rounds], **parts))
    return rows


def flat_rows(flat: Flatness) -> list[Row]:
    """Cost per episode with more and more queued, and finished, behind it; and what a finished episode leaves."""
    rows = [row_of("headrace, queued", __version__, UNIT, costs, queued=n) for n, costs in flat.queued.items()]
    rows += [row_of("headrace, finished", __version__, UNIT, costs, finished=n) for n, costs in flat.finished.items()]
    rows.append(
        row_of("server memory", __version__, "bytes per finished episode", [flat.bytes_per_finished], of=flat.count)
    )
    return rows


def ratio(these: list[float], those: list[float]) -> float:
    """The median of the pairwise ratios: neighbours in time share the machine's mood."""
    return round(statistics.median(this / that for this, that in zip(these, those, strict=True)), 3)


def versions(server: EmbeddedServer) -> str:
    """Server and client of the floor."""
    with redis.Redis.from_url(server.url) as client:
        info = client.info("server")
    return f"valkey {info['valkey_version']}, redis-py {redis.__version__}"


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=4096, help="per round")
    parser.add_argument("--queued", type=int, default=100_000, help="deepest queue")
    parser.add_argument("--finished", type=int, default=1_000_000, help="most finished episodes")
    arguments = parser.parse_args()

    parts = part_costs(arguments.repeats)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        costs = transport_costs(server, arguments.repeats, arguments.episodes)
        rows = transport_rows(costs, versions(server))
    with tempfile.TemporaryDirectory() as folder:
        flat = asyncio.run(measure_flatness(Path(folder), arguments.queued, arguments.finished))
    rows += [row_of(name, __version__, UNIT, samples) for name, samples in parts.items()]
    rows += flat_rows(flat)

    sums = {name: [cost["sum"] for cost in rounds] for name, rounds in costs.items()}
    ratios = {name: ratio(sums[name], sums[FLOOR]) for name in (LEDGER, JUDGED)}
    codec = {name: ratio(parts[name], parts["memcpy"]) for name in ("encode", "decode")}
    in_cache = {name: ratio(parts[name], parts["memcpy in cache"]) for name in ("encode", "decode")}
    flatness = {"queued": flat.growth(flat.queued), "finished": flat.growth(flat.finished)}
    holds = ratios[LEDGER] <= TARGET and max(codec.values()) <= CODEC_TARGET and max(flatness.values()) <= FLAT_TARGET
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"over the floor {ratios}  over memcpy {codec}, in cache {in_cache}  growth {flatness}\n")
    if arguments.json:
        figures = {
            "ratio_with_hash_and_gate": ratios[JUDGED],
            "codec_over_memcpy": codec,
            "codec_over_memcpy_in_cache": in_cache,
            "codec_target": CODEC_TARGET,
            "growth": flatness,
            "growth_target": FLAT_TARGET,
            "bytes_per_finished": flat.bytes_per_finished,
            "payload_bytes": payload_bytes(),
            "raw_bytes": RAW_BYTES,
        }
        sys.stdout.write(result("transport_ack", ratios[LEDGER], TARGET, holds, rows, **figures) + "\n")


if __name__ == "__main__":
    main()
