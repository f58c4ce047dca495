"""Run the missing cells of a table by several processes on one machine.

    python benchmarks/evidence_workers.py 8 simcse --minutes 4 --data DIR --out DIR

The arguments after the number of processes are those of `evidence.py`. Each process takes the next run that is neither
recorded nor taken by another one. A small network does not fill a GPU: its steps wait for the host, and several runs
beside each other finish sooner. Their seconds per epoch are longer than those of a run alone, so that a record holds
the number of processes. Packed images must be unpacked before.
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal() or int(sys.argv[1]) == 0:
        raise SystemExit("give the number of processes and the name of a table: evidence_workers.py 8 simcse")
    number, arguments = sys.argv[1], sys.argv[2:]
    command = [sys.executable, str(Path(__file__).with_name("evidence.py")), *arguments, "--workers", number]
    workers = [subprocess.Popen(command) for _ in range(int(number))]
    raise SystemExit(max(abs(worker.wait()) for worker in workers))  # a signal is a negative number


if __name__ == "__main__":
    main()
