"""Print a line for each code block: run, with its time and exit code, or checked. Exits with 1 if one fails.

python -m tests.documentation [--soak] [PAGE ...]        --soak: also run the blocks that train; default: all pages
"""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.documentation.blocks import PAGES, read_page
from tests.documentation.commands import problems_of
from tests.documentation.workplace import Workplace


def list_page(page: str, tags: tuple[str, ...], folder: Path) -> None:
    """Check the blocks of a page and run those with these tags. Exits the process with 0 or 1; changes its folder."""
    workplace = Workplace(folder)
    os.environ["TITANLITE_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    failed = False
    for block in read_page(page):
        if not block.language:
            continue
        if block.file:
            workplace.write(block.file, block.text)
        problems = problems_of(block)
        if block.is_program and block.tag in tags and not problems:
            for result in workplace.run_blocks([block]):
                print(result, flush=True)
                if result.exit_code:
                    failed = True
                    print(result.output)
        else:
            failed |= bool(problems)
            print(
                f"{'':9}  {'wrong' if problems else 'file' if block.file else 'valid':6}  {block}",
                *problems,
                sep="\n  ",
                flush=True,
            )
    sys.exit(failed)


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    tags = ("quick", "soak") if "--soak" in arguments else ("quick",)
    pages = [argument for argument in arguments if argument != "--soak"] or PAGES
    if unknown := [page for page in pages if page not in PAGES]:
        print(f"no page: {', '.join(unknown)}; the pages are {', '.join(PAGES)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    failed = []
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            process = multiprocessing.get_context("fork").Process(target=list_page, args=(page, tags, Path(folder)))
            process.start()
            process.join()
            failed += [page] if process.exitcode else []
    print(f"{len(pages)} pages in {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
