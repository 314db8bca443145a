"""Vectors for numba: what its type system lacks, as values with operators, lowered to LLVM's vector IR.

LLVM splits a vector to whatever registers the machine has, so one source serves AVX-512, AVX2, SSE and NEON, without
a line for any of them. Memory is addressed by plain integers: kernels then have one signature for every call, and
tensors at odd alignments cost nothing. No operation here is contracted, reassociated or flushed.

A `Vector` has 64 lanes: the widest pack of signs is one 64-bit word, and 64 float32 are enough independent work to
hide latencies. Words of 64 bits come 8 at a time (the codes of 64 elements, packed) or 16 (Philox).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import numba_cache

LANES = 64

#: For mypy, which would otherwise see the signature that numba hides.
_intrinsic: Any = intrinsic


def compiled(function: Callable, **options: Any) -> Any:
    """numba's njit as every kernel needs it: without the GIL, without fast-math, and kept on disk."""
    dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
    numba_cache.use(dispatcher)
    return dispatcher


def inlined(function: Callable) -> Any:
    """As `compiled`, for functions that take or return vectors: always inlined."""
    return compiled(function, forceinline=True)


class Vector(types.Type):
    """`lanes` numbers of one scalar type; comparisons give `boolean` ones."""

    def __init__(self, element: Any, lanes: int = LANES) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")


def _scalar(element: Any) -> ir.Type:
    if element in (types.float32, types.float64):
        return ir.FloatType() if element == types.float32 else ir.DoubleType()
    return ir.IntType(1 if element == types.boolean else element.bitwidth)


def _llvm(vector: Vector) -> ir.Type:
    return ir.VectorType(_scalar(vector.element), vector.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector))


F32, I32, U32, U16, U8, I8 = (
    Vector(t) for t in (types.float32, types.int32, types.uint32, types.uint16, types.uint8, types.int8)
)

MASK = Vector(types.boolean)

F32X16, I32X16 = Vector(types.float32, 16), Vector(types.int32, 16)

U64X8, U64X16, U32X8 = Vector(types.uint64, 8), Vector(types.uint64, 16), Vector(types.uint32, 8)


def _splat(builder: ir.IRBuilder, value: Any, lanes: int) -> Any:
    pair = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(pair, ir.Undefined), value, ir.IntType(32)(0))
    return _shuffle(builder, first, ir.Constant(pair, ir.Undefined), [0] * lanes)


def _shuffle(builder: ir.IRBuilder, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _operands(builder: ir.IRBuilder, args: Any, kinds: Any, vector: Vector) -> list[Any]:
    """The arguments as vectors: scalars fill every lane."""
    return [a if isinstance(t, Vector) else _splat(builder, a, vector.lanes) for a, t in zip(args, kinds, strict=True)]


def _operator(op: Callable, emit: Callable, compares: bool = False) -> None:
    def vector_of(args: Any) -> Vector | None:
        vectors = {a for a in args if isinstance(a, Vector)}
        return vectors.pop() if len(vectors) == 1 else None

    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            vector = vector_of(args)
            if vector is None:
                return None
            result = Vector(types.boolean, vector.lanes) if compares else vector
            return signature(result, *(a if isinstance(a, Vector) else vector.element for a in args))

    infer_global(op)(Typing)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = vector_of(sig.args)
        assert vector is not None
        return emit(builder, vector.element, *_operands(builder, args, sig.args, vector))

    for kinds in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(op, *kinds)(lower)


def _arithmetic(integer: str, floating: str) -> Callable:
    return lambda builder, element, a, b: getattr(builder, floating if element == types.float32 else integer)(a, b)


def _compare(sign: str) -> Callable:
    def emit(builder: Any, element: Any, a: Any, b: Any) -> Any:
        if element == types.float32:
            return builder.fcmp_ordered(sign, a, b)
        return (builder.icmp_signed if element.signed else builder.icmp_unsigned)(sign, a, b)

    return emit


_operator(operator.add, _arithmetic("add", "fadd"))

_operator(operator.sub, _arithmetic("sub", "fsub"))

_operator(operator.mul, _arithmetic("mul", "fmul"))

_operator(operator.truediv, lambda builder, element, a, b: builder.fdiv(a, b))

_operator(operator.and_, lambda builder, element, a, b: builder.and_(a, b))

_operator(operator.or_, lambda builder, element, a, b: builder.or_(a, b))

_operator(operator.xor, lambda builder, element, a, b: builder.xor(a, b))

_operator(operator.lshift, lambda builder, element, a, b: builder.shl(a, b))

_operator(operator.rshift, lambda builder, element, a, b: (builder.ashr if element.signed else builder.lshr)(a, b))

for _op, _sign in ((operator.lt, "<"), (operator.ge, ">="), (operator.gt, ">"), (operator.eq, "==")):
    _operator(_op, _compare(_sign), compares=True)


@_intrinsic
def select(context: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Lane by lane `yes` where the mask is set, `no` elsewhere; one of them may be a number."""
    vector = yes if isinstance(yes, Vector) else no if isinstance(no, Vector) else Vector(yes, mask.lanes)
    kinds = [mask] + [a if isinstance(a, Vector) else vector.element for a in (yes, no)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*_operands(builder, args, kinds, vector))

    return vector(*kinds), codegen


def _pointer(builder: ir.IRBuilder, address: Any, target: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(target))


def _alignment(element: Any) -> int:
    return min(int(element.bitwidth) // 8, 4)  # a wire promises no more than 4 bytes


def _loader(vector: Vector) -> Any:
    @_intrinsic
    def load(context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], _llvm(vector)), align=_alignment(vector.element))

        return vector(types.int64), codegen

    return load


def _getter(element: Any) -> Any:
    @_intrinsic
    def get(context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], _scalar(element)), align=_alignment(element))

        return element(types.int64), codegen

    return get


load_f32, load_u16, load_u8, load_u32x8, load_u64x8 = map(_loader, (F32, U16, U8, U32X8, U64X8))

load_f32x16 = _loader(F32X16)

get_f32, get_f64, get_i32, get_u32, get_i64, get_u16, get_u8 = map(
    _getter, (types.float32, types.float64, types.int32, types.uint32, types.int64, types.uint16, types.uint8)
)


@_intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """Write a vector, or a number of its own type, to `address`."""
    element = value.element if isinstance(value, Vector) else value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], args[1].type), align=_alignment(element))
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@_intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the cache line at `address`, which need not exist."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [builder.inttoptr(args[0], byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _splatter(vector: Vector) -> Any:
    @_intrinsic
    def splat(context: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _splat(builder, args[0], vector.lanes)

        return vector(vector.element), codegen

    return splat


def _converter(element: Any) -> Any:
    @_intrinsic
    def convert(context: Any, value: Any) -> Any:
        source, result = value.element, Vector(element, value.lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if element == types.float32:
                how = "sitofp" if source.signed else "uitofp"
            elif source == types.float32:
                how = "fptosi"
            elif source == types.boolean:
                how = "zext"
            elif element.bitwidth < source.bitwidth:
                how = "trunc"
            else:
                how = "sext" if source.signed else "zext"
            return getattr(builder, how)(args[0], _llvm(result))

        return result(value), codegen

    return convert


def _reinterpreter(target: Any) -> Any:
    """Lane by lane where vectors of 64 become others of 64: those may be shorter."""

    @_intrinsic
    def reinterpret(context: Any, value: Any) -> Any:
        result = target
        if isinstance(target, Vector) and isinstance(value, Vector) and target.lanes == LANES:
            result = Vector(target.element, value.lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], _llvm(result) if isinstance(result, Vector) else _scalar(result))

        return result(value), codegen

    return reinterpret


splat_f32, splat_i32, splat_u8, splat_u64x16 = map(_splatter, (F32, I32, U8, U64X16))

splat_f32x16, splat_i32x16 = map(_splatter, (F32X16, I32X16))

to_f32, to_i32, to_u32, to_u64, to_u16, to_u8, to_i8 = map(
    _converter,
    (types.float32, types.int32, types.uint32, types.uint64, types.uint16, types.uint8, types.int8),
)

as_f32, as_i32, as_u32, as_i8, as_u64x8 = map(_reinterpreter, (F32, I32, U32, I8, U64X8))

#: The mask as a 64-bit word, lane i in bit i; and back.
bits_of, mask_of = _reinterpreter(types.int64), _reinterpreter(MASK)

#: That of 16 lanes.
bits_of_16 = _reinterpreter(types.uint16)

#: The bits of one float32, and back.
float_of, word_of = _reinterpreter(types.float32), _reinterpreter(types.int32)


def _fold(emit: Callable) -> Any:
    @_intrinsic
    def fold(context: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            v, half = args[0], value.lanes // 2
            while half:
                nothing = ir.Constant(v.type, ir.Undefined)
                low = _shuffle(builder, v, nothing, list(range(half)))
                high = _shuffle(builder, v, nothing, list(range(half, 2 * half)))
                v, half = emit(builder, low, high), half // 2
            return builder.extract_element(v, ir.IntType(32)(0))

        return value.element(value), codegen

    return fold


#: The sum of all lanes, halves folded onto each other: the canonical order.
fold_sum = _fold(lambda builder, a, b: builder.fadd(a, b))

#: The largest lane of signed integers.
fold_max = _fold(lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))


@_intrinsic
def square_root(context: Any, value: Any) -> Any:
    """Of each lane, rounded as IEEE 754 says."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[0].type
        name, form = f"llvm.sqrt.v{value.lanes}f32", ir.FunctionType(kind, [kind])
        return builder.call(builder.module.declare_intrinsic(name, fnty=form), args)

    return value(value), codegen


@_intrinsic
def maximum(context: Any, a: Any, b: Any) -> Any:
    """The larger of two signed integers in each lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", *args), *args)

    return a(a, b), codegen


def _iota(vector: Vector) -> Any:
    @_intrinsic
    def iota(context: Any, start: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first = builder.trunc(args[0], _scalar(vector.element)) if vector.element.bitwidth < 64 else args[0]
            return builder.add(
                _splat(builder, first, vector.lanes), ir.Constant(_llvm(vector), list(range(vector.lanes)))
            )

        return vector(types.int64), codegen

    return iota


#: start, start + 1, … in the lanes.
iota_u64x16, iota_u32 = _iota(U64X16), _iota(U32)


@_intrinsic
def hadamard(context: Any, value: Any) -> Any:
    """The lanes times Sylvester's Hadamard matrix: sums and differences of those 1, 2, 4, … apart, in this order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (v,), distance, real = args, 1, value.element == types.float32
        while distance < value.lanes:
            lanes = range(value.lanes)
            other = _shuffle(builder, v, ir.Constant(v.type, ir.Undefined), [lane ^ distance for lane in lanes])
            upper = ir.Constant(ir.VectorType(ir.IntType(1), value.lanes), [lane & distance > 0 for lane in lanes])
            mine = builder.select(upper, builder.fneg(v) if real else builder.neg(v), v)
            v = builder.fadd(other, mine) if real else builder.add(other, mine)
            distance *= 2
        return v

    return value(value), codegen


@_intrinsic
def store_interleaved(context: Any, address: Any, a: Any, b: Any) -> Any:
    """Write a[0], b[0], a[1], b[1], … to `address`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = [lane for i in range(a.lanes) for lane in (i, a.lanes + i)]
        both = _shuffle(builder, args[1], args[2], lanes)
        builder.store(both, _pointer(builder, args[0], both.type), align=_alignment(a.element))
        return context.get_dummy_value()

    return types.void(types.int64, a, b), codegen


@_intrinsic
def count_ones(context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


@_intrinsic
def lowest_bit(context: Any, word: Any) -> Any:
    """The position of the lowest set bit of a word that is not zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.int64), codegen
