"""Stage 4 of 9: the checks worth running before GPU hours are spent: tokenizer, model, one overfitted batch, one checkpoint.

    uv run python test_model.py        a tick per check, exit code 1 if one fails; about a minute on two CPU cores

pytest collects the same functions. The reference algorithms here are the slow, obvious ones that the fast code must equal.
"""

import sys
import time
import traceback

from common import run_main

# ----------------------------------------------------------------------------------------------------------------------
# Running as a script


def main(argv: list[str] | None = None) -> int:
    if any(a in ("-h", "--help") for a in (sys.argv[1:] if argv is None else argv)):
        print(__doc__.strip())
        return 0
    checks = {name: check for name, check in globals().items() if name.startswith("test_") and callable(check)}
    failed = []
    for name, check in checks.items():
        t0 = time.perf_counter()
        try:
            detail = check()
        except Exception:
            failed.append(name)
            print(f"✗ {name[5:].replace('_', ' ')}\n{traceback.format_exc()}")
        else:
            note = f": {detail}" if detail else ""
            print(f"✓ {name[5:].replace('_', ' ')}{note} ({time.perf_counter() - t0:.1f} s)")
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
