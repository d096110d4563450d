"""Files of every kind give the same records, streamed."""

import csv
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hub_server import COMMIT, FakeHub, serve
