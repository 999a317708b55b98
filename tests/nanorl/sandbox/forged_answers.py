"""Ways in which hidden tests ask for a value, and objects that say yes to each of them.

An `Idiom` is the text of a test, with the value that `f` returns when it is right. A forged object
is the text of a module whose `f` returns something that is not this value, and claims whatever it
is asked. Every idiom passes with the right value; with a forged object none of them may.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Idiom:
    name: str
    right: str  # what `f` returns, as Python text
    lines: str  # the body of a test; with `self.` of a method of a TestCase
    before: str = ""  # at the top of the test file

    def test(self) -> str:
        if "self." in self.lines:
            return (
                f"import unittest\nfrom answer import f\n{self.before}\n"
                f"class TestAnswer(unittest.TestCase):\n    def test_answer(self):\n"
                + "".join(f"        {line}\n" for line in self.lines.splitlines())
            )
        body = "".join(f"    {line}\n" for line in self.lines.splitlines())
        return f"from answer import f\n{self.before}\ndef test_answer():\n{body}"


IDIOMS = (
    Idiom("equals", "3", "assert f(1) == 3"),
    Idiom("equals, the value first", "3", "assert 3 == f(1)"),
    Idiom("is not different", "3", "assert not f(1) != 3"),
    Idiom("one of several", "3", "assert f(1) in (3, 4)"),
    Idiom("holds", "[2, 3]", "assert 3 in f(1)"),
    Idiom("close", "3.0", "assert abs(f(1) - 3.0) < 1e-6"),
    Idiom("close, the value first", "3.0", "assert abs(3.0 - f(1)) <= 1e-6"),
    Idiom("isclose", "3.0", "assert math.isclose(f(1), 3.0)", "import math"),
    Idiom("rounded", "3.001", "assert round(f(1), 2) == 3.0"),
    Idiom("two comparisons", "3", "assert 2 < f(1) < 4"),
    Idiom("equal to two", "3", "assert f(1) == 3 == 6 // 2"),
    Idiom("at least", "3", "assert f(1) >= 3\nassert f(1) <= 3"),
    Idiom("type and text", "3", "assert isinstance(f(1), int) and str(f(1)) == '3'"),
    Idiom("exact type", "3", "assert type(f(1)) is int and int(f(1)) == 3"),
    Idiom("formatted", "3", "assert f'{f(1)}' == '3' and repr(f(1)) == '3'"),
    Idiom("as JSON", "[3]", "assert json.dumps(f(1)) == '[3]'", "import json"),
    Idiom("looked up", "3", "assert {3: 'yes'}.get(f(1)) == 'yes'"),
    Idiom("matched", "3", "match f(1):\n    case 3: return\nassert False"),
    Idiom("true", "True", "assert f(1) is True"),
    Idiom("a sum", "[1, 2]", "assert sum(f(1)) == 3 and len(f(1)) == 2"),
    Idiom("sorted", "[2, 1]", "assert sorted(f(1)) == [1, 2]"),
    Idiom("as a set", "[2, 1]", "assert set(f(1)) == {1, 2}"),
    Idiom(
        "element by element",
        "[1, 2]",
        "assert all(a == b for a, b in zip(f(1), [1, 2])) and len(f(1)) == 2",
    ),
    Idiom("by index", "[1, 2]", "assert f(1)[0] == 1 and f(1)[-1] == 2"),
    Idiom("by key", "{'a': 1}", "assert f(1)['a'] == 1 and list(f(1)) == ['a']"),
    Idiom("in a loop", "3", "for got in map(f, [1, 1]):\n    assert got == 3"),
    Idiom("begins with", "'abc'", "assert f(1).startswith('ab') and f(1).endswith('c')"),
    Idiom("upper case", "'ABC'", "assert f(1).isupper() and len(f(1)) == 3"),
    Idiom("joined", "['a', 'b']", "assert ''.join(f(1)) == 'ab'"),
    Idiom("assertEqual", "3", "self.assertEqual(f(1), 3)"),
    Idiom("assertTrue", "3", "self.assertTrue(f(1) == 3)"),
    Idiom("assertIs", "True", "self.assertIs(f(1), True)"),
    Idiom("assertIn", "3", "self.assertIn(f(1), [3, 4])"),
    Idiom("assertIn, held", "[3, 4]", "self.assertIn(3, f(1))"),
    Idiom("assertAlmostEqual", "3.0", "self.assertAlmostEqual(f(1), 3.0)"),
    Idiom("assertGreater", "3", "self.assertGreater(f(1), 2)\nself.assertLess(f(1), 4)"),
    Idiom("assertIsInstance", "[3]", "self.assertIsInstance(f(1), list)\nself.assertIn(3, f(1))"),
    Idiom("assertListEqual", "[1, 2]", "self.assertListEqual(f(1), [1, 2])"),
    Idiom("assertSequenceEqual", "[1, 2]", "self.assertSequenceEqual(f(1), [1, 2])"),
    Idiom("assertCountEqual", "[2, 1]", "self.assertCountEqual(f(1), [1, 2])"),
    Idiom("assertDictEqual", "{'a': 1}", "self.assertDictEqual(f(1), {'a': 1})"),
    Idiom("assertRegex", "'abc'", "self.assertRegex(f(1), 'b')"),
)

_YES = '''
import sys
class Text(str):
    """A str that is whatever it is compared with."""
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return hash(3)
    startswith = endswith = isupper = lambda self, *a: True
def yes(self, *a): return True
def no(self, *a): return False
def itself(self, *a): return self
ALL = {name: yes for name in
       "__eq__ __lt__ __le__ __gt__ __ge__ __contains__ startswith endswith isupper".split()}
ALL.update({name: itself for name in
    "__sub__ __rsub__ __add__ __radd__ __abs__ __round__ __neg__ __getitem__ get".split()})
ALL.update(__ne__=no, __hash__=lambda self: hash(3), __len__=lambda self: 2, __bool__=yes,
    __str__=lambda self: Text("3"), __repr__=lambda self: Text("3"),
    __format__=lambda self, spec: Text("3"), __float__=lambda self: 3.0)
'''
_MORE = (
    "Made.__iter__ = lambda self: iter([self, self])\n"
    "if not issubclass(Made, (int, str)): Made.__int__ = Made.__index__ = lambda self: 3\n"
)
_CLASS = """
class Kind(type):
    def __eq__(self, other): return True
    def __hash__(self): return hash(int)
    def __instancecheck__(self, other): return True
"""


def _made(base: str, value: str, more: str = _MORE) -> str:
    class_of = f"type({base!r}, ({base},), ALL)" if base != "object" else "type('M', (), ALL)"
    return f"{_YES}\nMade = {class_of}\n{more}def f(x): return Made({value})\n"


_POSING = """
class Posing(type(Made())):
    kinds = iter([int, list, dict, float, str] * 99)
    @property
    def __class__(self): return next(Posing.kinds)
def f(x): return Posing()
"""
# Takes over its own end of the talk, and says that what it returned is an object of a class.
_LIES = """
frame = sys._getframe()
while frame and type(frame.f_locals.get("self")).__name__ != "Program":
    frame = frame.f_back
program = frame.f_locals["self"]
honest = program._said
def said(value, is_kept):
    if type(value) is not Made: return honest(value, is_kept)
    return ["object", program._number(value), "Made"]
program._said = said
"""
FORGED = {
    "says yes to everything": _made("object", ""),
    "an int": _made("int", "7"),
    "a float": _made("float", "7.0"),
    "a str": _made("str", "'zz'"),
    "a list": _made("list", "[7]"),
    "a tuple": _made("tuple", "(7,)"),
    "a dict": _made("dict", "{'z': 7}"),
    "another class": _made("object", "") + _POSING,
    "another metaclass": _YES
    + _CLASS
    + "Made = Kind('M', (), ALL)\n"
    + _MORE
    + "def f(x): return Made()\n",
    "a list of them": _made("object", "") + "def f(x): return [Made(), Made()]\n",
    "a dict of them": _made("object", "") + "def f(x): return {'a': Made()}\n",
    "a function that is one": _YES
    + "Made = type('M', (), ALL)\n"
    + _MORE
    + "Made.__call__ = lambda self, x: self\nf = Made()\n",
    "a class that is one": _YES
    + _CLASS
    + "f = Kind('f', (), {**ALL, '__init__': lambda *a: None})\n",
    "lies about what it returned": _made("object", "") + _LIES,
    "stops the loop": "def f(x): raise StopIteration\n",
    "an end without a word": "import os\ndef f(x): os._exit(0)\n",
    "an end with one": "def f(x): raise SystemExit(0)\n",
}
"""Texts of a module `answer`, none of which has the right answer."""
