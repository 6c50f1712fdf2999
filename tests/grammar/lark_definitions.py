"""Lark definitions for tests of texts within other texts, and pieces of texts that come near them."""

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_file | delete_file | change_file
add_file: "*** Add File: " filename LF added+
delete_file: "*** Delete File: " filename LF
change_file: "*** Update File: " filename LF moved? change?
filename: /(.+)/
added: "+" /(.*)/ LF -> line
moved: "*** Move to: " filename LF
change: (place | line)+ last_line?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last_line: "*** End of File" LF
%import common.LF
"""
"""In the spirit of Codex's apply_patch."""

ARITHMETIC = r"""
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
"""OpenAI's example."""

DEFINITIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "patch": (
        PATCH,
        (
            "*** Begin Patch\n",
            "*** End Patch",
            "*** Add File: ",
            "*** Delete File: ",
            "*** Update File: ",
            "*** Move to: ",
            "@@\n",
            "@@ ",
            "a\\n",
            "*** End of File\n",
        ),
    ),
    "arithmetic": (ARITHMETIC, ("1", " + ", " * ", "22")),
    "lines": ("start: (/[^\\n]*/ LF)*\n%import common.LF", ()),
    "long lines": ('start: line+\nline: /[^\\n]+/ "\\n"', ()),
    "classes": (r'start: /[^a-c"\\]+/ /["\\]*/ /[\t\n\r]?/ | /\s*\w\S/', ()),
    "cases": (r'start: "aB"i /x[é-ü]+y/i "\n"i | "a".."c" "\"".."~"', ("é", "XéY", "ab", "AB")),
    "not": ('start: T "\\n"\nT: /(?s:.)+/ & ~/(?s:.*)\\n\\n(?s:.*)/ & ~/(?s:.*)b/', ("ab", "\n")),
    "times": (
        'start: A~2..3 ("\\n" | "\\t"){1,3} B{2}\nA: "a" | "\\""\nB: /\\\\|b/',
        ("aa", '"""', "\n\n\t", "\\b", "\\\\", "bb"),
    ),
    "many times": ('start: ("a" | "\\n" "b" | T){2,7} "\\t"{3,} ["\\"" start]\nT: /c|\\\\/', ("\t\t\t", "\nb", "ac\n")),
    "empty parts": (r'start: /a*/ /\n*/ /"?/ /(\\|b)*/ ("x" /\t*/)*', ("x",)),
    "longest lexeme": ('start: (A | B | NL)+\nA: /[a-c]+/\nB: /a"b/\nNL: /\\n/', ('a"b',)),
    "escapes at the border": ('start: (A | B | C)+\nA: /a/\nB: /a\\n"/\nC: /\\n"?\\\\/', ('a\n"', '\n"\\', "\n\\")),
    "recursive": (r'start: "(" start ")" | start "\n" start | /[ab\\]+/', ("(", ")")),
    "recursive to the left": ('start: start "\\"" T | T\nT: /[^"\\t]/ | "\\t" "\\"" "\\n"?', ()),
    "verbose": ('start: /a [b" ] # c\n \\n+ (?i: c )/x /\\x22\\u{5c}[[:space:]&&[^ ]]?/', ('ab\nC"\\', 'a"\n\nc"\\\t')),
    "categories": (r"start: /\p{L}+\P{L}\pP?[\p{Lu}\d--[3]]*/", ("é", "A", "1", "3", "!")),
    "controls": (r"start: /[\x00-\x08a]+/ /[^a]/", ("\x00", "\x08", "\x01", "a")),
    "json": (
        'start: value\nvalue: STRING | "[" [value ("," value)*] "]" | "a"\n%import common.ESCAPED_STRING -> STRING\n%ignore /[ \\t\\n]+/',
        ('"a\\"', "[", "]", ","),
    ),
    "sql": (
        """
        start: "SELECT" cols "FROM" NAME ["WHERE" cond] ";"
        cols: "*" | NAME ("," NAME)*
        cond: NAME "=" (INT | STR) (("AND" | "OR") cond)?
        STR: "'" /[^']*/ "'" | ESCAPED_STRING
        NAME: /[a-c_]+/ | "\\"" /[^"\\n]+/ "\\""
        %import common (INT, WS, ESCAPED_STRING)
        %ignore WS
        """.replace("        ", ""),
        (
            "SELECT ",
            "FROM ",
            "WHERE",
            "a_",
            "*",
            ",",
            "=",
            "'x'",
            '"a\\"b"',
            " AND ",
            "SELECT * FROM a",
            " WHERE a = ",
            ";",
            "SELECT a_ FROM b;",
        ),
    ),
    "two ignored": ('start: "a" ("b" | "\\n" "c")* "\\""\n%ignore /[ \\t]+/\n%ignore /\\\\[^"]/', ("\\a", "\n c")),
}
"""By name: a definition, and pieces beside single characters. Where something is ignored, the text ends with something that must be there."""

CHARACTERS = "\"\\\n\t\rabcxynt()[],=+-@*1/;#'BA_<> \x7fé漢🙂"
