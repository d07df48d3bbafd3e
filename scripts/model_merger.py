"""The place where scripts written for verl-agent look for ``python -m verl.model_merger``."""

import sys

from verl.model_merger.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
