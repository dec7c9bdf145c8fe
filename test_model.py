"""Stage 4 of 9: the checks worth running before GPU hours are spent: tokenizer, model, one overfitted batch, one checkpoint.

    uv run python test_model.py        a tick per check, exit code 1 if one fails; about a minute on two CPU cores

pytest collects the same functions. The reference algorithms here are the slow, obvious ones that the fast code must equal.
"""

import contextlib
import io
import time
import traceback
from collections.abc import Sequence

from common import run_main
from config import parse_config

# Settings this stage takes on its command line: none beyond the preset, since the checks bring their own tiny ones.
USES = ()

# ----------------------------------------------------------------------------------------------------------------------
# Running as a script


def main(argv: Sequence[str] | None = None) -> int:
    parse_config(argv, doc=__doc__, uses=USES)
    checks = {name: check for name, check in globals().items() if name.startswith("test_") and callable(check)}
    failed = [name for name, check in checks.items() if not passes(name, check)]
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def passes(name, check) -> bool:
    """Runs one check and prints a tick with whatever the check printed (a count, a difference), or a cross and why."""
    title, t0, output = name.removeprefix("test_").replace("_", " "), time.perf_counter(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            check()
    except Exception:
        print(f"\u2717 {title}\n{traceback.format_exc()}", flush=True)
        return False
    detail = " ".join(output.getvalue().split())
    print(f"\u2713 {title}{': ' if detail else ''}{detail} ({time.perf_counter() - t0:.1f} s)", flush=True)
    return True


if __name__ == "__main__":
    run_main(main)
