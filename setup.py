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
            # Carrying loads over from one step of a loop to the next leaves too few registers for its sums.
            extra_compile_args=["-O3", "-fvisibility=hidden", "-fno-predictive-commoning"],
            libraries=["m"],
            optional=True,
        )
    ]
)
