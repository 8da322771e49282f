"""Models that never end or fill the memory: endless chat templates, and extreme configurations and files."""

import json
import os
import random
import resource
import shutil
import time
from pathlib import Path

from jinja2.exceptions import TemplateError

from tests.adversary import hosts

_SECONDS = 20
"""More processor time than a case of a model takes."""
_RENDERING = 10
"""More processor time than a rendering takes: about 5 s on a busy machine."""

_DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{2}"
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% for i in range(99999)|map('string') %}{% for j in range(99999)|map('string')|list %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    *(
        "{% for i in range(99999) %}{% set x = range(99999)|" + name + " %}{% endfor %}"
        for name in ("min", "max", "sort", "sort(reverse=true)", "unique|list", "list|tojson", "join", "string")
    ),
    "{% set x = range(99999)|map('string')|list %}{% for i in range(99999) %}{% set y = x|sort %}{% endfor %}",
    "{% set x = 'a b ' * 9999 %}{% for i in range(99999) %}{% set y = x|title %}{% endfor %}",
    "{% set x = [[[[1] * 9] * 9] * 9] * 9 %}{% for i in range(99999) %}{% set y = x|tojson(indent=4) %}{% endfor %}",
    "{% for i in range(29) %}{% for j in range(99999) %}" + "{% set x = i %}" * 5_000 + "{% endfor %}{% endfor %}",
    "{% macro f() %}" + "{% set x = 1 %}" * 5_000 + "{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% call f() %}"
    + "{% set x = 1 %}" * 5_000
    + "{% endcall %}{% endfor %}",
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
    loops += ["{{% set {1} %}}{0}{{% endset %}}{{{{ {1} }}}}"]
    loops += ["{{% macro {1}() %}}{0}{{% endmacro %}}{{{{ {1}() }}}}{{{{ {1}() }}}}"]
    inner = draw.choice([*ENDLESS, "{{ messages|tojson }}", "{{ messages[0].content }}", "{{ 'a' * 999 }}"])
    for depth in range(draw.randrange(6)):
        inner = draw.choice(loops).format(inner, f"v{depth}")
    return inner + "{% for m in messages %}{{ m.content }}{% endfor %}"


def chat_template(seed: int, folder: Path) -> None:
    """A random template that may be endless: rendered or refused within seconds and without filling the memory."""
    from posttrain.data.templates import LimitedEnvironment

    draw = random.Random(seed)
    messages = [{"role": "user", "content": "x " * draw.randrange(99)}] * draw.randrange(1, 9)
    template = random_template(draw)
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        text = LimitedEnvironment().from_string(template).render(messages=messages)
    except (TemplateError, ArithmeticError, RecursionError, TypeError, ValueError):
        text = ""
    assert len(text) < 100_000_000, template[:300]
    assert time.process_time() - started < _RENDERING, template[:300]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, template[:300]  # KiB


def model_directory(seed: int, folder: Path) -> None:
    """A model with changed sizes, formats, index and sparse files: loaded or refused in one sentence, within seconds."""
    from posttrain.errors import InputError
    from posttrain.models.load import load_model, load_tokenizer
    from posttrain.recipe.model import ModelRecipe

    draw = random.Random(seed)
    model = shutil.copytree(hosts.tiny_model(), folder / "model")
    config = json.loads((model / "config.json").read_text())
    for key in draw.sample(list(config), draw.randrange(3)):
        odd = [10**7, 10**12, -1, -(10**9), 0, 1.5, 1e300, True, None, "9" * 5_000, [], {}, [10**9] * 3, {key: 10**9}]
        config[key] = draw.choice(odd)
    (model / "config.json").write_text(json.dumps(config))
    kind = draw.randrange(6)
    if kind == 0:
        (model / "config.json").write_text(draw.choice(["[", '{"a": ']) * draw.choice([10, 100_000]))
    elif kind == 1:
        name = draw.choice(sorted(path.name for path in model.iterdir()))
        os.truncate(model / name, draw.choice([8 << 30, 0, 100]))
    elif kind == 2:
        names = ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.bin", "adapter_model.bin"]
        payload = f"cos\nsystem\n(S'touch {folder / 'ran'}'\ntR.".encode()
        (model / "model.safetensors").rename(model / draw.choice(["model.safetensors", "elsewhere"]))
        (model / draw.choice(names)).write_bytes(payload)
    elif kind == 3:
        name = draw.choice(["../model/model.safetensors", "/dev/zero", "", "model.safetensors", "\x00", "a" * 300])
        index = draw.choice([{"weight_map": {"a": name}}, {"weight_map": name}, [], {}])
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == 4:
        (model / "chat_template.jinja").write_text(random_template(draw))
    started = time.process_time()
    for load in (load_model, load_tokenizer):
        refusal = ""
        try:
            load(ModelRecipe(path=str(model)))
        except InputError as error:
            refusal = str(error)
        assert "\n" not in refusal, refusal
        assert len(refusal) < 2_000, refusal
    assert time.process_time() - started < _SECONDS
    assert not (folder / "ran").exists()
