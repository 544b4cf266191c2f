// The plan of search_wgmma: which rows each thread block and warpgroup takes, and how a thread block divides
// its shared memory among its rings.
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

constexpr int kDoneBarrier = 4;  // a named barrier; the second phase has its own number

// Returns how many warpgroups prepare rows if this many multiply them.
UEFL_HOST_DEVICE constexpr int preparers_of(int groups) { return groups == 2 ? 2 : 1; }

// The roles in the order of the warps: one warpgroup prepares, kGroups multiply, one finishes, and with two
// multiplying warpgroups a second one prepares. A thread starts with kLaunch registers, and the roles trade
// them. Their sum must not exceed the registers of the launch, or the multiplying warps wait forever. There
// is no separate warp for the copies: a quarter of a multiprocessor has 16384 registers, which is five warps
// of 96.
template <int kGroups, bool kLong>
struct WgmmaRoles {
  static constexpr int kPreparers = preparers_of(kGroups);
  static constexpr int kWarpgroups = 5, kThreads = kWarpgroups * kGroupThreads, kLaunch = 96;
  static constexpr int kPrepare = kGroups == 3 && !kLong ? 72 : 88,
                       kMultiply = kGroups == 3 && kLong ? 104 : 112,
                       kFinish = kGroups == 3 && !kLong ? 72 : 80;
  static_assert(kPreparers * kPrepare + kGroups * kMultiply + kFinish <= kWarpgroups * kLaunch);
  static_assert(kLaunch * kThreads <= 65536);
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

// An item of work: the 64 rows of one codebook that a warpgroup multiplies.
struct Item {
  int64_t codebook, first, count;  // first: the first of these rows; count: all rows of the codebook

  __device__ int64_t output(const Shape& shape, int row) const {
    return (first + row) * shape.codebooks + codebook;
  }
};

// Assigns items to thread blocks and warpgroups. Warpgroup g takes items g, g + groups and so on of its
// thread block. With one codebook, thread blocks get items one by one. With several codebooks, the items of a
// round (one for each warpgroup) have the same codebook, because the warpgroups share the codewords.
struct Items {
  int64_t rows;                             // of one codebook
  unsigned dealt, codebooks, groups, grid;  // dealt: portions that the thread blocks take in turn; grid:
                                            // number of thread blocks
  int code_tiles;                           // blocks of 128 codewords in a codebook

  Items() = default;
  Items(const Shape& shape, int in_block, int64_t most_blocks)
      : rows(shape.outputs / shape.codebooks),
        codebooks(static_cast<unsigned>(shape.codebooks)),
        groups(static_cast<unsigned>(in_block)),
        code_tiles(static_cast<int>(shape.padded_k / kBlockCodewords)) {
    const int64_t at_once = (codebooks == 1 ? 1 : in_block) * kGroupRows;
    dealt = static_cast<unsigned>((rows + at_once - 1) / at_once * shape.codebooks);
    grid = static_cast<unsigned>(std::min<int64_t>(dealt, most_blocks));
  }
  // Returns the number of items of a thread block. Divisions have 32 bits, because a division of 64 bits is a
  // function call.
  UEFL_HOST_DEVICE int number(unsigned block) const {
    return static_cast<int>((dealt - block + grid - 1) / grid * (codebooks == 1 ? 1 : groups));
  }
  UEFL_HOST_DEVICE int rounds(unsigned block) const {
    return static_cast<int>((static_cast<unsigned>(number(block)) + groups - 1) / groups);
  }
  UEFL_HOST_DEVICE int codebook(unsigned block, int round) const {
    return codebooks == 1 ? 0 : static_cast<int>((block + static_cast<unsigned>(round) * grid) % codebooks);
  }
  UEFL_HOST_DEVICE Item at(unsigned block, int item) const {
    const auto which = static_cast<unsigned>(item);
    if (codebooks == 1) return {0, int64_t{block + which * grid} * kGroupRows, rows};
    const unsigned tile = block + which / groups * grid;
    return {static_cast<int>(tile % codebooks),
            (int64_t{tile / codebooks} * groups + which % groups) * kGroupRows, rows};
  }
};

// Divides numbers below 2^52 by a number that the host knows. GPUs have no instruction for this, and a loop
// would be a call.
struct Divisor {
  int64_t by;
  double inverse;

  Divisor() = default;
  explicit Divisor(int64_t number) : by(number), inverse(1.0 / static_cast<double>(number)) {}
  UEFL_HOST_DEVICE int64_t divide(int64_t value, int64_t& rest) const {
    auto quotient = static_cast<int64_t>(static_cast<double>(value) * inverse);  // at most one off
    rest = value - quotient * by;
    if (rest < 0) --quotient, rest += by;
    if (rest >= by) ++quotient, rest -= by;
    return quotient;
  }
};

// Finds the codebook of an output and the first element of its row, as Shape::begin() does.
struct Origin {
  Divisor segments, inner;

  __device__ int64_t begin(const Shape& shape, int64_t output, int64_t& codebook) const {
    int64_t segment, within;
    const int64_t outer = inner.divide(segments.divide(output, segment), within);
    codebook = shape.codebooks == 1 ? 0 : segment;
    return outer * shape.outer_stride + within * shape.inner_stride + segment * shape.d * shape.stride;
  }
};

// The result of a lane of a multiplying warp for a row: its best and its second-best score, as the packed
// integers of vq_assign_scores.h, and the tile of 128 codewords that has the best one.
struct alignas(16) LaneScores {
  PackedTopTwo scores;
  int tile, unused;
};

// The results for the 64 rows of a tile: the scores of the four lanes of a row, and the length and the
// rounding error of each row.
struct Slot {
  LaneScores found[kGroupRows][4];
  float norm[kGroupRows], rest[kGroupRows];
};

// The layout of shared memory. A kernel keeps it in constant memory, which saves registers for the pointers.
struct WgmmaPlan {
  Items items;
  Origin origin;
  int64_t row_step = 0;  // elements between the rows of x, if all rows are equally far apart; otherwise 0
  int64_t room = 0;      // entries of the list of a finishing warp
  int codewords = 0, tiles = 0,
      raw = 0;  // places of the rings: blocks of codewords; tiles of rows and their slots; chunks of rows
                // before their conversion
  bool resident = false;     // every block of the codebook has its own place
  int chunks = 0, size = 0;  // blocks of 64 elements in a row; total bytes
  int starts_at = 0, tiles_at = 0, slots_at = 0, raw_at = 0, barriers_at = 0;

  UEFL_HOST_DEVICE int barriers() const { return 2 * (codewords + tiles * (chunks + 1)); }
};

constexpr int kWgmmaStaticBytes = 1024;  // the state of search_wgmma, and alignment

// Lays the rings out in memory. At the end, the second phase reuses all memory except the barriers. Returns
// true if they fit.
inline bool place(WgmmaPlan& plan, const Shape& shape, int64_t element_bytes, int64_t limit) {
  int64_t size = 0;
  const auto take = [&](int64_t count, int64_t bytes) {
    const int64_t at = size;
    size += count * bytes;
    return static_cast<int>(at);
  };
  take(plan.codewords, kBlockBytes);
  plan.tiles_at = take(plan.tiles, plan.chunks * kTileBytes);
  plan.slots_at = take(plan.tiles, sizeof(Slot));
  plan.raw_at = take(plan.raw * preparers_of(static_cast<int>(plan.items.groups)),
                     kGroupRows * kBlockElements * element_bytes);
  plan.starts_at = take(plan.codewords, kStartBytes);
  size = std::max(size, mma_bytes(shape.d));  // the second phase also needs the parts below
  plan.barriers_at = take(plan.barriers(), sizeof(Barrier));
  plan.size = static_cast<int>(size);
  return size + kWgmmaStaticBytes <= limit;
}

// Returns the distance between the rows of x in elements, or 0 if it is not the same for all rows.
inline int64_t row_step(const Shape& shape) {
  const bool one = shape.outputs / shape.segments <= shape.inner;  // there is no outer stride
  const bool even = one || shape.outer_stride == shape.inner * shape.inner_stride;
  if (shape.codebooks > 1 || !even) return 0;
  if (shape.segments == 1) return shape.inner_stride;
  return shape.inner_stride == shape.segments * shape.d ? shape.d : 0;
}

constexpr int kMostRaw = 3;
constexpr int64_t kFewCodewords = 512;

// Plans the rings within `limit` bytes of shared memory. The result has codewords = 0 if the memory is too
// small.
inline WgmmaPlan divide(const Shape& shape, int groups, int64_t element_bytes, int64_t limit,
                        int64_t most_blocks) {
  if (shape.d > 16 * kBlockElements) return {};  // such rows do not fit
  WgmmaPlan plan;
  plan.items = Items(shape, groups, most_blocks);
  plan.origin = {Divisor(shape.segments), Divisor(shape.inner)};
  plan.row_step = row_step(shape);
  plan.chunks = static_cast<int>((shape.d + kBlockElements - 1) / kBlockElements);
  const int64_t blocks = shape.codebooks * (shape.padded_k / kBlockCodewords) * plan.chunks;
  // Every warpgroup begins with one tile. Codewords that stay need no more. Streamed codewords need four
  // blocks in flight.
  plan.tiles = groups, plan.raw = 1;
  plan.codewords = static_cast<int>(std::min<int64_t>(blocks, 64));
  plan.resident = plan.codewords == blocks && place(plan, shape, element_bytes, limit);
  for (const int codewords : {4, 2}) {
    if (!plan.resident) plan.codewords = codewords;
    if (place(plan, shape, element_bytes, limit)) break;
  }
  if (!place(plan, shape, element_bytes, limit)) return {};
  // The rest of the memory goes first to rows under way, then to more tiles, then to more blocks of
  // codewords, then to more of all. With two warpgroups that prepare, a place belongs to one of them and to
  // one warpgroup that multiplies. So their number is even. Otherwise a warpgroup could run ahead of the
  // other one by two phases of a barrier, which it cannot tell from none.
  const int step = preparers_of(groups);
  const auto more = [&](int& what, int most, int by = 1) {
    while (what + by <= most) {
      what += by;
      if (place(plan, shape, element_bytes, limit)) continue;
      what -= by;
      break;
    }
  };
  more(plan.raw, 2), more(plan.tiles, groups + step, step);
  if (!plan.resident) more(plan.codewords, static_cast<int>(std::min<int64_t>(blocks, 6)));
  more(plan.tiles, groups + 2, step), more(plan.raw, kMostRaw), more(plan.tiles, 2 * groups, step);
  plan.room = int64_t{plan.items.number(0)} * kWarpRows;
  place(plan, shape, element_bytes, limit);
  return plan;
}

// Plans two multiplying warpgroups if long rows leave no room for the codewords otherwise, or if the codebook
// is so small that preparing the rows takes longer than multiplying them. A second warpgroup prepares then.
inline WgmmaPlan divide(const Shape& shape, int64_t element_bytes, int64_t limit, int64_t most_blocks) {
  const WgmmaPlan two = divide(shape, 2, element_bytes, limit, most_blocks);
  const bool longer = two.chunks > 1 || element_bytes == sizeof(float);
  if (shape.k <= kBlockCodewords || (shape.k <= kFewCodewords && longer)) return two;
  const WgmmaPlan three = divide(shape, 3, element_bytes, limit, most_blocks);
  const bool fits = three.chunks == 1 || three.resident || three.codewords >= 4;
  return fits || two.codewords < three.codewords ? three : two;
}

// Returns true if rows can be read 16 bytes at a time: their elements are adjacent, and rows begin at
// multiples of 16 bytes.
inline bool rows_in_pieces(const Shape& shape, const void* x, int64_t element_bytes) {
  const auto whole = [&](int64_t elements) { return elements * element_bytes % 16 == 0; };
  return shape.stride == 1 && whole(shape.d) && whole(shape.inner_stride) && whole(shape.outer_stride) &&
         reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

}  // namespace
}  // namespace uefl::cuda
