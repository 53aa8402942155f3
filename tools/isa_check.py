"""Build the C++ kernels for a machine and compare every instruction set there with the plain kernels.

    python tools/isa_check.py
    python tools/isa_check.py --compiler aarch64-linux-gnu-g++ --run "qemu-aarch64-static -cpu max"

The second line needs Debian's g++-aarch64-linux-gnu and qemu-user-static. Emulation says nothing about speed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src/retain/kernels/cpu/csrc"
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"]
COMMON = ["-std=c++17", "-O3", "-fopenmp", "-fno-strict-aliasing", "-fno-math-errno", *WARNINGS]
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mprefer-vector-width=512"
AMX = f"{AVX512} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16 -DRETAIN_TILES"
X86_ISAS = {  # name: width and flags, as in CMakeLists.txt
    "plain": (4, ""),
    "avx2": (8, "-mavx2 -mfma"),
    "avx512": (16, AVX512),
    "avx512bf16": (16, f"{AVX512} -mavx512bf16"),
    "amx": (16, AMX),
    "amx_emulated": (16, "-O2 -DRETAIN_TILES -DRETAIN_EMULATE_TILES"),
}
ARM_ISAS = {
    "plain": (4, ""),
    "neon_dotprod": (4, "-march=armv8.2-a+dotprod"),
    "neon_i8mm": (4, "-march=armv8.2-a+dotprod+i8mm+bf16"),
    "amx_emulated": (16, "-O2 -DRETAIN_TILES -DRETAIN_EMULATE_TILES"),
}


# Files that are compiled for each instruction set, and their flags, as in CMakeLists.txt.
FOR_EACH_ISA = {
    "isa/isa_kernels.cpp": [],
    "slots/slot_kernels.cpp": [],
    "gemm/ggml_blocks.cpp": ["-ffp-contract=off"],
    "attention/state_kernels.cpp": [],
}
OF_PYTHON = ("program/binding.cpp", "program/operations.cpp", "isa/native_isa.cpp")  # or of the build alone


def main() -> int:
    """Build the check and run it. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--run", default="", help="the command that runs a program of that machine")
    args = parser.parse_args()
    machine = subprocess.run([args.compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    is_arm = machine.startswith(("aarch64", "arm64"))
    isas, define = (ARM_ISAS, "-DRETAIN_ARM") if is_arm else (X86_ISAS, "-DRETAIN_X86")
    with tempfile.TemporaryDirectory() as folder:
        left_out = {SOURCES / p for p in (*OF_PYTHON, *FOR_EACH_ISA)}
        sources = sorted(set(SOURCES.glob("*/*.cpp")) - left_out)
        built = "".join(f"ISA({name})" for name in isas)
        jobs = [(p, [define, f"-DRETAIN_BUILT_ISAS={built}"]) for p in sources]
        check = (ROOT / "tools/isa_check.cpp", [define, "-O1"])  # GCC 12 for aarch64 fails at vectorizing it
        jobs.append(check)
        for name, (width, flags) in isas.items():
            defines = [f"-DRETAIN_ISA={name}", f"-DRETAIN_WIDTH={width}"]
            jobs += [(SOURCES / p, [*defines, *flags.split(), *options]) for p, options in FOR_EACH_ISA.items()]

        def compile_object(number: int) -> str:
            source, flags = jobs[number]
            out = f"{folder}/{number}.o"
            subprocess.run([args.compiler, *COMMON, *flags, f"-I{SOURCES}", "-c", source, "-o", out], check=True)
            return out

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_object, range(len(jobs))))
        program = f"{folder}/isa_check"
        subprocess.run([args.compiler, "-static", "-fopenmp", *objects, "-o", program], check=True)
        return subprocess.run([*shlex.split(args.run), program]).returncode


if __name__ == "__main__":
    sys.exit(main())
