"""Parts of `housekeeping.erasures` that tests use."""

from __future__ import annotations

from housekeeping.core.errors import ErasureInterrupted, UnknownSubject
from housekeeping.erasures import ERASE, ERASURES, declare, graph, request, subjects_of, work
from housekeeping.erasures.found_rows import export
from housekeeping.erasures.graph import cut_links, read_reach
from housekeeping.erasures.work import Erasing, execute, find_key
from housekeeping.insight.erasures import find_erasure, plan_erasure, verified
from housekeeping.ledger import erasures as ledger
from housekeeping.ledger.schema import Erasure
from housekeeping.sweeps.stage import merged
