// What a score modification computes positions with, where they are not FAR: floats, which are exact for such, or integers
// where arrays are looked up by them. ANY: they may become large on the way. POSITIONS and FAR are constants of the head
// (cuda_common/modification.py: positions).
#pragma once

enum Positions { ANY, INTEGERS, FLOATS };

template <int> struct Position { using type = long long; using start = long long; };
template <> struct Position<INTEGERS> { using type = int; using start = int; };
template <> struct Position<FLOATS> { using type = float; using start = int; };
using position = Position<POSITIONS>::type;
using start = Position<POSITIONS>::start;

template <bool FIRST, typename A, typename B> struct Chosen { using type = A; };
template <typename A, typename B> struct Chosen<false, A, B> { using type = B; };
