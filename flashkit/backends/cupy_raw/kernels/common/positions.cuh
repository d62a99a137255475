// The type in which a score modification computes with positions below FAR: float, which is exact there, or int where
// positions index arrays. ANY: intermediate values may overflow both. The head defines POSITIONS and FAR
// (cuda_common/modification.py: positions).
#pragma once

enum Positions { ANY, INTEGERS, FLOATS };

template <int> struct Position { using type = long long; using start = long long; };
template <> struct Position<INTEGERS> { using type = int; using start = int; };
template <> struct Position<FLOATS> { using type = float; using start = int; };
using position = Position<POSITIONS>::type;
using start = Position<POSITIONS>::start;
