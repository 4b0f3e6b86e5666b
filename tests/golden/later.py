"""Use a stored run as tests/golden/use.py does, in a later version whose flavors have other values."""

from dataclasses import replace
from unittest.mock import patch

from tests.golden import use
from titanlite.models.registry import SHIPPED


def main() -> None:
    for family in SHIPPED:
        debug = family.flavors["debug"]
        changes = {"norm_eps": 0.5, "init_std": 1.0} | ({"balance_loss": 0.5} if debug.n_experts > 1 else {})
        patch.dict(family.flavors, {"debug": replace(debug, **changes)}).start()
    use.main()


if __name__ == "__main__":
    main()
