"""`trimtab`: 0 done, 1 it failed, 2 it was asked wrongly, 3 the answer is no."""

from __future__ import annotations

import sys

from sidecar.supervisor import tether


def main() -> None:
    tether()
    from sidecar.commands.main import run  # after the tether: imports take a while

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
