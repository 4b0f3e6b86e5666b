"""Progress bars: tqdm, whose lock holds among threads only.

tqdm's own one holds among forked processes too. Since Python 3.14 that is a named semaphore, which a process that ends
at once leaves behind: Python's resource tracker would warn of it after the last line of a run.
"""

from threading import RLock

from tqdm import tqdm as tqdm

tqdm.set_lock(RLock())  # also that of other libraries' bars, which are its subclasses
