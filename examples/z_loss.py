"""The z-loss (Chowdhery et al., "PaLM", 2022, section 5) beside the cross-entropy. Use it with

[job]
plugins = ["z_loss.py"]
[loss]
terms = ["z_loss"]
"""

import titanlite

titanlite.register_term("z_loss", lambda logsumexp, labels: 1e-4 * logsumexp.square(), of="logsumexp")  # noqa: ARG005
