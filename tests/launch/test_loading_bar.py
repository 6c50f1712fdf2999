"""The bar while the weights load."""

import builtins
import sys
import types

from headrace.processes.handshake import loading_bar


class ZMQInteractiveShell:
    """What `get_ipython()` is in a notebook."""


def test_a_notebook_without_ipywidgets_has_a_line_of_text_and_no_warning(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with loading_bar() as show:  # warnings are errors in tests
        show(1, 4)
        show(4, 4)
    printed = capsys.readouterr()
    assert printed.err == "\rloading weights  25 %\rloading weights 100 %\n"
    assert printed.out == ""


def test_nothing_is_printed_to_a_file(capsys):
    with loading_bar() as show:
        show(1, 4)
    assert capsys.readouterr() == ("", "")
