// The variants, by name: way_groups_chunks[_options]. benchmarks/gpu_layout.py reads the names here.
//
//   ways      cross: as in the kernel today; g4, g8: the least of every four or eight codewords
//   options   first: sums begin at the starts; marked: with clocks
VARIANT(cross_3_1, Cross, 3, 1)
VARIANT(cross_3_1_first, Cross, 3, 1, true)
VARIANT(g4_3_1, Groups<4>, 3, 1)
VARIANT(g4_3_1_first, Groups<4>, 3, 1, true)
VARIANT(g8_3_1, Groups<8>, 3, 1)
VARIANT(g4_4_1, Groups<4>, 4, 1)
VARIANT(cross_3_1_marked, Cross, 3, 1, false, true)
VARIANT(g4_3_1_marked, Groups<4>, 3, 1, false, true)
VARIANT(cross_3_2, Cross, 3, 2)
VARIANT(g4_3_2, Groups<4>, 3, 2)
VARIANT(cross_3_4, Cross, 3, 4)
VARIANT(g4_3_4, Groups<4>, 3, 4)
VARIANT(cross_2_8, Cross, 2, 8)
VARIANT(g4_2_8, Groups<4>, 2, 8)
