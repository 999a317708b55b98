"""The parsers under the names that environments outside of this repository import: they live in
nanoinfer/chat, where the server reads with them too."""

import sys

from nanoinfer.chat import base, chat, choose, fenced, hermes, llama, pythonic

for _module in (base, chat, choose, fenced, hermes, llama, pythonic):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
