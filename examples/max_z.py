"""The max-z loss (Yang et al., "Baichuan 2", 2023, section 2.7) beside the cross-entropy. Use it with

[job]
plugins = ["max_z.py"]
[loss]
terms = ["max_z"]
"""

import titanlite

titanlite.register_term("max_z", lambda logits, labels: 2e-4 * logits.amax(dim=1).square())  # noqa: ARG005
