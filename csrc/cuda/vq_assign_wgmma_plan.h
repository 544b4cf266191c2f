// The plan of search_wgmma: rows for blocks and warpgroups, and the shared memory of a block for its rings.
#pragma once

#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/vq_assign_mma.h"

namespace uefl::cuda {
namespace {

constexpr int kGroupThreads = 128, kGroupWarps = kGroupThreads / kWarp, kGroupRows = 64;
static_assert(kGroupRows == kGroupWarps * kWarpRows);
constexpr int kWgmmaColumns = kBlockCodewords / 4, kBlockBytes = kBlockHalves * 2,
              kStartBytes = kStarts * sizeof(float);
constexpr int kTileBytes = kGroupRows * kBlockElements * 2;  // one chunk of 64 rows in float16

// Named barriers; the turns use the ones before them, and the second pass its own.
constexpr int kDoneBarrier = 4, kOpenBarrier = 6;

// The roles in the order of the warps. A thread starts with kLaunch registers, and the roles trade them:
// their sum must not exceed the registers of the launch, or the multiplying warps wait forever.
// A warp of its own for the copies does not fit: a quarter of a multiprocessor has 16384 registers, five
// warps of 96.
template <int kGroups>
struct Layout {
  static constexpr int kWarpgroups = kGroups + 2, kThreads = kWarpgroups * kGroupThreads;
  static constexpr int kLaunch = 65536 / kThreads / 8 * 8;
  static constexpr int kPrepare = kGroups == 3 ? 56 : 64, kMultiply = kGroups == 3 ? 112 : 168,
                       kFinish = kGroups == 3 ? 88 : 112;
  static constexpr int kDone = (kGroups + 1) * kGroupThreads;  // threads that multiply or finish
  static_assert(kPrepare + kGroups * kMultiply + kFinish <= kWarpgroups * kLaunch);
};

// A place in a ring, and the parity of its phase.
struct Ring {
  int size, place = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++place == size) place = 0, parity ^= 1;
  }
  __device__ void advance(int by) {
    for (place += by; place >= size; place -= size) parity ^= 1;
  }
};

// The 64 rows of one book that a warpgroup multiplies.
struct Item {
  int64_t book, first, count;  // first: the first row of the item; count: all rows of the book

  __device__ int64_t output(const Shape& shape, int row) const { return (first + row) * shape.books + book; }
  // The number of rows among the 16 that begin with this one.
  UEFL_HOST_DEVICE int rows(int from) const {
    const int64_t left = count - first - from;
    return static_cast<int>(left < 0 ? 0 : left < kWarpRows ? left : kWarpRows);
  }
};

// The items of the blocks: warpgroup g takes number g, g + groups and so on of its block. With one book,
// blocks get items one by one. With several books, the items of a round (one for each warpgroup) have the
// same book, because the warpgroups share the codewords.
struct Items {
  int64_t rows;                         // of a book
  unsigned dealt, books, groups, grid;  // rows of a book for this number of blocks
  unsigned together = 1;                // blocks that share their reads of the codebook
  int code_tiles;                       // blocks of 128 codewords in a book

  Items() = default;
  Items(const Shape& shape, int in_block, int64_t most_blocks)
      : rows(shape.outputs / shape.books),
        books(static_cast<unsigned>(shape.books)),
        groups(static_cast<unsigned>(in_block)),
        code_tiles(static_cast<int>(shape.padded_k / kBlockCodewords)) {
    const int64_t at_once = (books == 1 ? 1 : in_block) * kGroupRows;
    dealt = static_cast<unsigned>((rows + at_once - 1) / at_once * shape.books);
    grid = static_cast<unsigned>(std::min<int64_t>(dealt, most_blocks));
  }
  // Makes pairs of blocks. A block may have no rows.
  void pair(int64_t most_blocks) {
    together = 2;
    grid = static_cast<unsigned>(std::min<int64_t>((grid + 1) / 2, most_blocks / 2) * 2);
  }
  // Divisions have 32 bits, because a division of 64 bits is a function call.
  UEFL_HOST_DEVICE int number(unsigned block) const {
    return static_cast<int>((dealt - block + grid - 1) / grid * (books == 1 ? 1 : groups));
  }
  // A pair has the rounds of its first block, which has no fewer items than the other one.
  UEFL_HOST_DEVICE int rounds(unsigned block) const {
    return static_cast<int>((static_cast<unsigned>(number(block / together * together)) + groups - 1) /
                            groups);
  }
  UEFL_HOST_DEVICE int book(unsigned block, int round) const {
    return books == 1 ? 0 : static_cast<int>((block + static_cast<unsigned>(round) * grid) % books);
  }
  UEFL_HOST_DEVICE Item at(unsigned block, int item) const {
    const auto which = static_cast<unsigned>(item);
    if (books == 1) return {0, int64_t{block + which * grid} * kGroupRows, rows};
    const unsigned tile = block + which / groups * grid;
    return {static_cast<int>(tile % books), (int64_t{tile / books} * groups + which % groups) * kGroupRows,
            rows};
  }
};

// Division by a number that the host knows, of numbers below 2^52: the instruction set has none, and a loop
// would be a call.
struct Divisor {
  int64_t by;
  double inverse;

  Divisor() = default;
  explicit Divisor(int64_t number) : by(number), inverse(1.0 / static_cast<double>(number)) {}
  UEFL_HOST_DEVICE int64_t divide(int64_t value, int64_t& rest) const {
    auto quotient = static_cast<int64_t>(static_cast<double>(value) * inverse);  // one off at most
    rest = value - quotient * by;
    if (rest < 0) --quotient, rest += by;
    if (rest >= by) ++quotient, rest -= by;
    return quotient;
  }
};

// The first element of the row of an output, as in Shape::begin(), and its book.
struct Origin {
  Divisor segments, inner;

  __device__ int64_t begin(const Shape& shape, int64_t output, int64_t& book) const {
    int64_t segment, within;
    const int64_t outer = inner.divide(segments.divide(output, segment), within);
    book = shape.books == 1 ? 0 : segment;
    return outer * shape.outer_stride + within * shape.inner_stride + segment * shape.d * shape.stride;
  }
};

constexpr int kTakePiece = 4;  // elements

// The pieces of rows that the lanes of a warp take in turn: of one row first, then of the next one.
struct Steps {
  int pieces, rows_on, pieces_on;  // of a row; from a piece of a lane to its next one
  unsigned inverse;                // of pieces

  Steps() = default;
  explicit Steps(int number)
      : pieces(number), rows_on(kWarp / number), pieces_on(kWarp % number), inverse(65536u / number + 1) {}
  UEFL_HOST_DEVICE void first(unsigned lane, int& row, int& piece) const {
    row = static_cast<int>(lane * inverse >> 16), piece = static_cast<int>(lane) - row * pieces;
  }
  UEFL_HOST_DEVICE void on(int& row, int& piece) const {
    row += rows_on, piece += pieces_on;
    if (piece >= pieces) piece -= pieces, ++row;
  }
};

// The result of a lane of a multiplying warp for a row: its least score and the next one, as the packed
// integers of vq_assign_scores.h, and the tile of 128 codewords with the least score.
struct alignas(16) Found {
  TwoLeast scores;
  int tile, unused;
};

// The other state of the 64 rows of a tile: results of the four lanes of a row, length and rest of the
// rows.
struct Slot {
  Found found[kGroupRows][4];
  float norm[kGroupRows], rest[kGroupRows];
};

// A row that is open between two codewords, or two groups of four: their numbers in the book.
struct Pending {
  int64_t output;
  int first, next;
};

// A row that vq quantizes: its first element in x, its output, and the number of its codeword, counted over
// all books.
struct Chosen {
  int64_t begin, output;
  int code;
};

constexpr int kMostPending = 2 * kWarpRows;  // of a finishing warp: those settled at once, and of one item

// The layout of shared memory. A kernel has it in constant memory, which saves registers for the pointers.
struct WgmmaPlan {
  Items items;
  Origin origin;
  Steps steps;
  int64_t room = 0;  // of the list of open rows of a finishing warp
  int codewords = 0, tiles = 0,
      raw = 0;  // places of the rings: blocks of codewords, tiles of rows and their slots, rows as they are
  bool resident = false;  // every block of the codebook has a place of its own
  bool in_turn = false;   // the warpgroups multiply one after the other
  bool dense = false;     // rows lie side by side, without gaps, and are one chunk each
  int chunks = 0, row_bytes = 0,
      size = 0;  // blocks of 64 elements in a row; bytes between rows of a raw place; bytes in all
  int starts_at = 0, tiles_at = 0, slots_at = 0, raw_at = 0, pending_at = 0, chosen_at = 0, barriers_at = 0;

  UEFL_HOST_DEVICE int barriers() const { return 2 * (codewords + tiles * (chunks + 1)) + kGroupWarps * raw; }
};

constexpr int kWgmmaStaticBytes = 1024;  // State, in vq_assign_wgmma.h, and alignment

// Lay the rings out in memory. At the end, the second pass reuses all memory except the barriers. Returns
// whether they fit.
inline bool place(WgmmaPlan& plan, int64_t d, int64_t limit) {
  int64_t size = 0;
  const auto take = [&](int64_t count, int64_t bytes) {
    const int64_t at = size;
    size += count * bytes;
    return static_cast<int>(at);
  };
  take(plan.codewords, kBlockBytes);
  plan.tiles_at = take(plan.tiles, plan.chunks * kTileBytes);
  plan.slots_at = take(plan.tiles, sizeof(Slot));
  plan.raw_at = take(plan.raw * kGroupWarps, kWarpRows * plan.row_bytes);
  plan.starts_at = take(plan.codewords, kStartBytes);
  plan.pending_at = take(kGroupWarps, kMostPending * sizeof(Pending));
  size = std::max(size, mma_bytes(d));  // the second pass also needs the parts below
  plan.chosen_at = take(kGroupWarps, kWarpRows * sizeof(Chosen));
  plan.barriers_at = take(plan.barriers(), sizeof(Barrier));
  plan.size = static_cast<int>(size);
  return size + kWgmmaStaticBytes <= limit;
}

// Plans the rings for rows of x that are copied 16 bytes at a time, within `limit` bytes of shared memory.
// The result has codewords = 0 if the memory is too small.
inline WgmmaPlan divide(const Shape& shape, int groups, int64_t element_bytes, int64_t limit,
                        int64_t most_blocks) {
  if (shape.d > 16 * kBlockElements) return {};  // far beyond what fits
  WgmmaPlan plan;
  plan.items = Items(shape, groups, most_blocks);
  plan.origin = {Divisor(shape.segments), Divisor(shape.inner)};
  plan.steps = Steps(static_cast<int>(shape.d / kTakePiece));
  plan.chunks = static_cast<int>((shape.d + kBlockElements - 1) / kBlockElements);
  plan.row_bytes = static_cast<int>(std::min<int64_t>(shape.d, kBlockElements) * element_bytes);
  const bool one = shape.outputs / shape.segments <= shape.inner;  // no outer stride to take
  plan.dense = shape.books == 1 && plan.chunks == 1 && shape.inner_stride == shape.segments * shape.d &&
               (one || shape.outer_stride == shape.inner * shape.inner_stride);
  const int64_t blocks = shape.books * (shape.padded_k / kBlockCodewords) * plan.chunks;
  // A tile for every warpgroup to begin with. Codewords that stay need no more; streamed rows want four
  // blocks in flight.
  plan.tiles = groups, plan.raw = 1;
  plan.codewords = static_cast<int>(std::min<int64_t>(blocks, 64));
  plan.resident = plan.codewords == blocks && place(plan, shape.d, limit);
  for (const int codewords : {4, 2}) {
    if (!plan.resident) plan.codewords = codewords;
    if (place(plan, shape.d, limit)) break;
  }
  if (!place(plan, shape.d, limit)) return {};
  // The rest of the memory goes to rows under way first, then to room between the roles, then to more blocks
  // of codewords.
  const auto more = [&](int& what, int most) {
    while (what < most) {
      ++what;
      if (place(plan, shape.d, limit)) continue;
      --what;
      break;
    }
  };
  more(plan.raw, 2), more(plan.tiles, groups + 1);
  if (!plan.resident) more(plan.codewords, static_cast<int>(std::min<int64_t>(blocks, 6)));
  more(plan.raw, 4), more(plan.tiles, 2 * groups), more(plan.raw, 6);
  // A warpgroup multiplies by all chunks of a tile in its turn, and none of them is free before the last
  // warpgroup has had its own.
  plan.in_turn = plan.resident || plan.codewords > plan.chunks;
  // With two warpgroups, reads of the codebook from the second-level cache would take longer than the
  // products: pairs of blocks share them.
  if (groups == 2 && plan.chunks > 1 && !plan.resident && shape.books == 1 &&
      std::min<int64_t>(plan.items.dealt, most_blocks) > 1)
    plan.items.pair(most_blocks);
  plan.room = int64_t{plan.items.number(0)} * kWarpRows;
  place(plan, shape.d, limit);
  return plan;
}

// Three warpgroups, unless long rows leave no room for the codewords then.
inline WgmmaPlan divide(const Shape& shape, int64_t element_bytes, int64_t limit, int64_t most_blocks) {
  const WgmmaPlan three = divide(shape, 3, element_bytes, limit, most_blocks);
  if (three.chunks == 1 || three.resident || three.codewords >= 4) return three;
  const WgmmaPlan two = divide(shape, 2, element_bytes, limit, most_blocks);
  return two.codewords >= three.codewords ? two : three;
}

// Returns true if rows can be copied in bulk: elements side by side, rows at multiples of 16 bytes.
inline bool rows_in_bulk(const Shape& shape, const void* x, int64_t element_bytes) {
  const auto whole = [&](int64_t elements) { return elements * element_bytes % 16 == 0; };
  return shape.stride == 1 && whole(shape.d) && whole(shape.inner_stride) && whole(shape.outer_stride) &&
         reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

}  // namespace
}  // namespace uefl::cuda
