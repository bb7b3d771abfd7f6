"""The process that renders chat templates for hpcrl/data/render.py: requests on the standard input, texts on the standard output.

A request is its length in 8 bytes and a JSON list of template and options. An answer is a byte, 1 for an error, a length and a text in UTF-8.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from hpcrl.data.tokenizer import without_torch

_ROOM = 1 << 30
_LARGEST = 1 << 28


def main(seconds: float) -> None:
    """Answer requests until the standard input ends; SIGPROF, which nothing catches, ends a rendering that takes longer than `seconds`."""
    render_jinja_template = _import_renderer()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)  # who asks ends with them, and with that this process
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who asks was killed
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    bound_memory(_ROOM)

    def answer(template: str, options: dict[str, Any]) -> tuple[bytes, str]:
        try:
            texts, _ = render_jinja_template(chat_template=template, **options)
        except TemplateSyntaxError as error:
            return b"\1", f"line {error.lineno}: {error.message}"
        except TemplateError as error:  # such as roles that do not take turns
            return b"\1", str(error)
        except MemoryError:
            return b"\1", f"it needs more than {_ROOM >> 30} GiB of memory"
        # what expressions of a template raise, and what transformers raises of tools
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            return b"\1", f"{type(error).__name__}: {error}"
        return b"\0", "".join(texts)

    while size := int.from_bytes(asked.read(8), "little"):
        if len(request := asked.read(size)) < size:  # who asks was killed
            return
        template, options = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        status, text = answer(template, options)
        if len(text) > _LARGEST:
            status, text = b"\1", f"it writes {len(text)} characters; expected at most {_LARGEST}"
        content = text.encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(status + len(content).to_bytes(8, "little") + content)
        answers.flush()


def _import_renderer() -> Callable[..., Any]:
    """Import transformers' renderer without the packages above it: they take a second of processor time, and it needs nothing of them."""
    with without_torch():
        for name in ("transformers", "transformers.utils"):
            spec = find_spec(name)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


def bound_memory(room: int) -> None:
    """Bound the memory of this process to so many bytes more than it has now, without a dump of its core."""
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = own + room if most == resource.RLIM_INFINITY else min(own + room, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(float(sys.argv[1]))
