"""What pyproject.toml can't say: the library of inner loops, built where there is a C compiler (docs/speed.md).

Its functions are called through ctypes: neither Python's headers nor torch are needed, and without a compiler the
package installs and works without it.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "nystromformer/attention/native"

setup(
    ext_modules=[
        Extension(
            "nystromformer.attention.native._kernels",
            sources=sorted(glob(f"{FOLDER}/*.c")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            extra_compile_args=["-O3", "-fvisibility=hidden"],  # known to every compiler; kernels.h has the rest
            libraries=["m"],
            optional=True,
        )
    ]
)
