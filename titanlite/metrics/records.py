"""What loggers take."""

from titanlite.metrics.experts import ExpertsRecord
from titanlite.metrics.meter import Record
from titanlite.metrics.samples import SamplesRecord
from titanlite.metrics.validation import ValidationRecord

LogRecord = Record | ValidationRecord | SamplesRecord | ExpertsRecord
