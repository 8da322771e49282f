"""Chat templates that never end or fill the memory: fixed ones, and random nestings of their parts."""

import random

_DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{2}"
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% for i in range(99999)|map('string') %}{% for j in range(99999)|map('string')|list %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10**12 }}",
    "{{ ([0] * 9999999999)|length }}",
    "{{ (9**999)**99 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'.zfill(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ ('%9999d' * 9999) % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "{{ 'a'|indent(10**10) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ 1.5|round(10**9, 'ceil') }}",
    "{{ lipsum(n=10**9) }}",
    "{{ ('\t' * 99999).expandtabs(99999) }}",
    "{% set x = 'a' * 99999 %}{{ x.translate({97: x}) }}",
    "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 99999 %}{{ x|replace('a', x) }}",
    "{% set x = ('a' * 9999)|list %}{{ x|join(x|join('b' * 9999)) }}",
    "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% if x == x[1:] %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% if x.upper() %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}" + "b" * 50_000 + "{% endfor %}",
    _DOUBLED.format("'a'", "ns.x ~ ns.x", ""),
    _DOUBLED.format("'a'", "ns.x + ns.x", ""),
    _DOUBLED.format("[1]", "ns.x + ns.x", ""),
    _DOUBLED.format("7", "ns.x * ns.x", ""),
    _DOUBLED.format("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    _DOUBLED.format("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    _DOUBLED.format("[1]", "[ns.x, ns.x]", "{{ ns.x|string }}"),
    _DOUBLED.format("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x ~ 'a' }}"),
    _DOUBLED.format("[1]", "[ns.x, ns.x]", "{{ '%s' % [ns.x] }}"),
    _DOUBLED.format("(1,)", "(ns.x, ns.x)", "{% set d = {ns.x: 1} %}"),
    _DOUBLED.format("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    _DOUBLED.format("(1,)", "(ns.x, ns.x)", "{{ {}.get(ns.x) }}"),
    _DOUBLED.format("[1]", "namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"),
]
"""Each takes hours, or terabytes, without limits."""


def random_template(draw: random.Random) -> str:
    """Parts of endless and harmless templates in each other, at random."""
    loops = ["{{% for {1} in range(99999) %}}{0}{{% endfor %}}", "{{% if messages|length > 1 %}}{0}{{% endif %}}"]
    loops += [
        "{{% set {1} %}}{0}{{% endset %}}{{{{ {1} }}}}",
        "{{% macro {1}() %}}{0}{{% endmacro %}}{{{{ {1}() }}}}{{{{ {1}() }}}}",
    ]
    inner = draw.choice([*ENDLESS, "{{ messages|tojson }}", "{{ messages[0].content }}", "{{ 'a' * 999 }}"])
    for depth in range(draw.randrange(6)):
        inner = draw.choice(loops).format(inner, f"v{depth}")
    return inner + "{% for m in messages %}{{ m.content }}{% endfor %}"
