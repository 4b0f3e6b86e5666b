"""Training program with the mistake of the table `MISTAKES` whose position is in the environment variable MISTAKE."""

import os

from tests.distributed.mistakes import MISTAKES
from titanlite import train
from titanlite.ranks.failure import end_process

if __name__ == "__main__":
    with MISTAKES[int(os.environ["MISTAKE"])].planted():
        train.main()
        end_process(0)
