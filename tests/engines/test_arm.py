"""The compiled kernel on a 64-bit ARM processor: cross-compiled, run by an emulator, and compared with the plain formula.

Needs Debian's packages g++-aarch64-linux-gnu and qemu-user.
"""

import platform
import shutil
import subprocess

import numpy as np
import pytest
import torch

from posttrain.engines.local.cpu import kernel
from posttrain.models.cpu import compiler

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HEADS, GROUPS, SIZE, SLOTS, PAGES, SCALING, EPSILON = 2, 3, 64, 3, 2, 0.1, 1e-5
STOPS = (1, 77, 200)
"""Tokens of the three sequences."""
PROGRAM = """
#include "%s"
#include <cstdio>
#include <cstdlib>
int main() {
    const int queries = SLOTS * HEADS * GROUPS * HEAD, cache = PAGES * SLOTS * HEADS * PAGE * HEAD;
    auto numbers = [](int count) {
        number* x = (number*)malloc(count * sizeof(number));
        if ((int)fread(x, sizeof(number), count, stdin) != count) exit(1);
        return x;
    };
    number *q = numbers(queries), *k = numbers(cache), *v = numbers(cache), *weight = numbers(HEAD);
    number* out = (number*)malloc(queries * sizeof(number));
    Row rows[SLOTS];
    if (fread(rows, sizeof(Row), SLOTS, stdin) != SLOTS) return 1;
    attend(q, HEADS * GROUPS * HEAD, k, v, out, rows, SLOTS, HEADS, SLOTS, SCALING, 2);
    fwrite(out, sizeof(number), queries, stdout);
    normalize(q, weight, out, SLOTS * HEADS * GROUPS, HEAD, EPSILON, 2);
    fwrite(out, sizeof(number), queries, stdout);
}
"""


def raw(x):
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().tobytes()


@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
@pytest.mark.parametrize("dtype", list(compiler.TYPES))
def test_the_kernel_attends_and_normalizes_on_arm(dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    shape = (PAGES, SLOTS, HEADS, kernel.PAGE, SIZE)
    queries = torch.randn(SLOTS, HEADS, GROUPS, SIZE, generator=generator).to(dtype)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(SIZE, generator=generator).to(dtype)
    rows = np.array([[slot, slot, 0, 0, stop] for slot, stop in enumerate(STOPS)], np.int64)
    (tmp_path / "program.cpp").write_text(PROGRAM % kernel.SOURCE)
    sizes = {"TYPE_BF16": compiler.TYPES[dtype], "HEAD": SIZE, "PAGE": kernel.PAGE, "PAGES": PAGES, "HEADS": HEADS}
    sizes |= {"GROUPS": GROUPS, "SLOTS": SLOTS, "SCALING": f"{SCALING}f", "EPSILON": f"{EPSILON}f"}
    flags = [flag for flag in compiler.FLAGS if flag not in ("-shared", "-fPIC")]
    macros = [f"-D{name}={value}" for name, value in sizes.items()]
    program = tmp_path / "program"
    options = [f"-I{compiler.HEADER.parent}", *flags, "-fopenmp", "-static", *macros, "-o", program]
    command = [COMPILER, *options, tmp_path / "program.cpp"]
    subprocess.run(command, check=True, timeout=120)
    given = b"".join(map(raw, (queries, keys, values, weight))) + rows.tobytes()
    written = subprocess.run([EMULATOR, program], input=given, capture_output=True, check=True, timeout=120).stdout
    kind = torch.int16 if dtype == torch.bfloat16 else torch.float32
    attended, normal = torch.frombuffer(bytearray(written), dtype=kind).view(dtype).view(2, *queries.shape).double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for slot, stop in enumerate(STOPS):
        key, value = (x[:, slot].transpose(0, 1).flatten(1, 2)[:, :stop].double() for x in (keys, values))
        scores = queries[slot].double() @ key.transpose(1, 2) * SCALING
        torch.testing.assert_close(attended[slot], scores.softmax(-1) @ value, atol=tolerance, rtol=tolerance)
    x = queries.double()
    expected = weight.double() * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    torch.testing.assert_close(normal, expected, atol=tolerance, rtol=tolerance)


def test_flags_of_one_processor_stay_away_from_others(monkeypatch):
    """And Apple's compiler, which has no OpenMP, is not asked for it."""
    asked = []
    monkeypatch.setattr(compiler, "build", lambda name, source, command, depends_on: asked.append(command))
    for machine, openmp in (("x86_64", ["-fopenmp"]), ("aarch64", ["-fopenmp"]), ("arm64", [])):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(compiler, "OPENMP", openmp)
        monkeypatch.setattr(compiler, "compiler", lambda: "c++")
        compiler.compiled("decoding", kernel.SOURCE, [])
    x86 = [[flag for flag in compiler.X86_FLAGS if flag in command] for command in asked]
    assert x86 == [compiler.X86_FLAGS, [], []]
    assert ["-fopenmp" in command for command in asked] == [True, True, False]
