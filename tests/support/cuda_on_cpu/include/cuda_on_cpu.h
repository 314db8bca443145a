// Gives g++ the CUDA language, so that a .cu file compiles as it is and runs on the CPU. Tests only.
//
// What is not here, kernels cannot use in a test: then add it. __CUDA_ARCH__ is not defined; code that only a GPU
// understands, inline PTX above all, goes behind `#ifndef CUDA_ON_CPU`.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define CUDA_ON_CPU 1

#include "cuda_language.h"
#include "cuda_warp.h"
#include "cuda_memory.h"
#include "cuda_integers.h"
#include "cuda_floats.h"
#include "cuda_halves.h"
#include "kernel_export.h"
