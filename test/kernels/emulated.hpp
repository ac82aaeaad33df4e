// Hopper's instructions on a host, in the place of kernels/hopper.cuh: the kernels' own text runs where there is no GPU.
//
// The threads of one cluster are fibers that take turns in a random order. What the hardware does on its own time happens
// here as late as it may: copies when they are waited for or at random, products when they are waited for. Shared memory
// starts as NaN. A kernel that waits for what never comes, counts wrong bytes or leaves its memory fails with a sentence.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

using u32 = uint32_t;
using u64 = uint64_t;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x = 0, y = 0, z = 0; };  // as there: what is compared with one is unsigned
struct Map { const char* at; int64_t rows, columns, box, size; };  // emulation.py fills it

inline float as_float(u32 bits) { float v; std::memcpy(&v, &bits, 4); return v; }
inline u32 as_bits(float v) { u32 bits; std::memcpy(&bits, &v, 4); return bits; }
inline float __uint_as_float(u32 bits) { return as_float(bits); }
inline u32 __float_as_uint(float v) { return as_bits(v); }
inline float __int_as_float(u32 bits) { return as_float(bits); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// --- threads, blocks, a cluster ---

constexpr u32 BASE = 16;  // where a block's shared memory begins: the kernels align it themselves
constexpr u32 RANK = 20;  // bits of an address below the rank of the block that it is in

struct Gate {  // of a fixed number of threads; opens when all have come
    int wanted = 0, came = 0, opened = 0;
    int come() { int mine = opened; if (++came == wanted) came = 0, ++opened; return mine; }
};

struct Bytes { int arrivals = 0; long missing = 0; bool done = false; };

struct Queued { float* sum; int width; u64 a, b; bool in_registers, turned, more, eight; u32 held[4]; };

struct Block {
    Index index;
    int threads = 0, lazy = 0;  // lazy: a warpgroup that mostly waits, if there is one of that number
    std::vector<char> memory;
    std::map<u32, Bytes> barriers;
    Gate all;
    std::vector<Gate> warps, groups;
    std::vector<u32> lanes;  // two of every thread, in turn
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Index index;
    Block* block = nullptr;
    bool done = false;
    int shuffles = 0, met = 0;
    const char* why = "";
    std::function<bool()> may;
    std::vector<std::vector<std::function<void()>>> copies = std::vector<std::vector<std::function<void()>>>(1);  // of each group
    std::vector<Queued> products;
    std::vector<size_t> committed;  // how many of them each group ends
};

struct Cluster {
    std::vector<Block> blocks;
    std::vector<Thread> threads;
    Gate gate;
    std::vector<std::function<void()>> under_way;  // what comes by itself, some time
    std::mt19937 chance;
    ucontext_t scheduler;
    Thread* now = nullptr;
    Index block_count, threads_of_block;
    std::function<void()> entry;
};
inline Cluster* cluster;

struct Failed {};
inline std::string failure;  // of the last launch, empty where there is none

[[noreturn]] inline void fail(const char* what, long a = 0, long b = 0) {
    failure = std::string(what) + " (" + std::to_string(a) + ", " + std::to_string(b) + ")";
    if (cluster->now) swapcontext(&cluster->now->context, &cluster->scheduler);  // for good
    throw Failed{};
}

#define threadIdx (cluster->now->index)
#define blockIdx (cluster->now->block->index)
#define gridDim (cluster->block_count)
#define blockDim (cluster->threads_of_block)

inline void until(const char* why, std::function<bool()> may) {
    Thread* mine = cluster->now;
    mine->why = why, mine->may = std::move(may);
    swapcontext(&mine->context, &cluster->scheduler);
}

inline void pass(Gate& gate, const char* why) {
    int mine = gate.come();
    until(why, [&gate, mine] { return gate.opened > mine; });
}

inline Block& own() { return *cluster->now->block; }
inline Block& block_at(u32 at) { return at >> RANK ? cluster->blocks.at((at >> RANK) - 1) : own(); }

inline char* place(Block& block, u32 at, u32 size) {
    at &= (1u << RANK) - 1;
    if (at < BASE || at + size > block.memory.size() || at % min(size, 16u)) fail("address outside the block's memory, or not aligned", at, size);
    return block.memory.data() + at;
}
template <class T> T read_as(u32 at) { T v; std::memcpy(&v, place(own(), at, sizeof v), sizeof v); return v; }
inline void write(Block& block, u32 at, const void* from, u32 size) { std::memcpy(place(block, at, size), from, size); }

inline char* own_memory() { return own().memory.data() + BASE; }
inline u32 shared_at(const void* p) { return static_cast<const char*>(p) - own().memory.data(); }
inline void __syncthreads() { pass(own().all, "__syncthreads"); }

template <class T>
T __shfl_xor_sync(u32, T v, int far) {
    Thread* mine = cluster->now;
    Block& block = own();
    int at = mine->shuffles++ % 2 * block.threads, lane = mine->index.x;
    std::memcpy(&block.lanes[at + lane], &v, 4);
    pass(block.warps[lane / 32], "a shuffle");
    std::memcpy(&v, &block.lanes[at + (lane ^ far)], 4);
    return v;
}

inline void publish() {}
inline void start_next() {}
inline void wait_for_last() {}
inline void ready() { cluster->now->met = cluster->gate.come(); }
inline void meet() { int mine = cluster->now->met; until("meet", [mine] { return cluster->gate.opened > mine; }); }
inline u32 in_block(u32 at, int rank) { return at | static_cast<u32>(rank + 1) << RANK; }

inline void meet_group() { pass(own().groups[cluster->now->index.x / 128], "a warpgroup"); }

// --- barriers that count bytes ---

inline void settle(Bytes& barrier) { barrier.done = barrier.arrivals == 0 && barrier.missing == 0; }
inline void make_barrier(u32 at, u32 arrivals) { place(own(), at, 8), own().barriers[at] = {static_cast<int>(arrivals), 0, false}; }
inline void show_barriers() {}
inline void count(Block& block, u32 at, long bytes, int arrivals) {
    auto found = block.barriers.find(at & ((1u << RANK) - 1));
    if (found == block.barriers.end()) fail("no barrier was made here", at);
    if (found->second.done) fail("a barrier that is through is counted on", at, bytes);
    found->second.missing += bytes, found->second.arrivals -= arrivals;
    if (found->second.arrivals < 0) fail("too many arrivals", at);
    settle(found->second);
}
inline void expect(u32 at, u32 bytes) { count(own(), at, bytes, 1); }
inline void wait_bytes(u32 at) {
    Bytes& barrier = own().barriers.at(at);
    until("bytes", [&barrier] { return barrier.done; });
}

// --- copies ---

inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
inline void fetch_map(const Map&) {}
inline void bring(u32 to, const Map& map, int column, int row, u32 barrier) {
    if (to % 128 || column * map.size % 16) fail("a box must stand on whole rows", to, column);
    Block* block = &own();
    cluster->under_way.push_back([=] {
        for (int r = 0; r < map.box; ++r)
            for (int c = 0; c < 128; c += 16) {
                int64_t at = column * map.size + c, across = map.columns * map.size;
                char v[16] = {};
                if (row + r < map.rows && at < across) std::memcpy(v, map.at + (row + r) * across + at, std::min<int64_t>(16, across - at));
                write(*block, swizzled(to + r * 128 + c), v, 16);
            }
        count(*block, barrier, -map.box * 128, 0);
    });
}
inline void ask_ahead(const void*) {}
inline void ask_ahead(const char*, u32) {}
inline void copy16(u32 to, const void* from) {
    Block* block = &own();
    cluster->now->copies.back().push_back([=] { write(*block, to, from, 16); });
}
inline void commit_copies() { cluster->now->copies.emplace_back(); }
template <int LEFT>
void wait_copies() {
    auto& groups = cluster->now->copies;
    for (size_t i = 0; i + 1 + LEFT < groups.size(); ++i) {
        for (auto& copy : groups[i]) copy();
        groups[i].clear();
    }
}

inline float read1(u32 at) { return read_as<float>(at); }
inline float2 read2(u32 at) { return read_as<float2>(at); }
inline uint2 read8(u32 at) { return read_as<uint2>(at); }
inline uint4 read16(u32 at) { return read_as<uint4>(at); }
inline void write2(u32 at, float a, float b) { float2 v = {a, b}; write(own(), at, &v, 8); }
inline void write16(u32 at, uint4 v) { write(own(), at, &v, 16); }
inline void write4(u32 at, u32 v) { write(own(), at, &v, 4); }
inline void clear16(u32 at) { uint4 v = {}; write(own(), at, &v, 16); }
template <class T> void send(u32 at, T v, u32 barrier) {
    if (at >> RANK == 0 || at >> RANK != barrier >> RANK) fail("a part and its barrier are in different blocks", at, barrier);
    Block* block = &block_at(at);
    cluster->under_way.push_back([=] { write(*block, at, &v, sizeof v), count(*block, barrier, -static_cast<long>(sizeof v), 0); });
}
inline void send1(u32 at, u32 v, u32 barrier) { send(at, v, barrier); }
inline void send2(u32 at, float a, float b, u32 barrier) { send(at, float2{a, b}, barrier); }
inline void send16(u32 at, uint4 v, u32 barrier) { send(at, v, barrier); }

// --- matrix instructions ---

template <int N, bool REGISTERS, bool TURNED, bool EIGHT = false> struct Instruction {
    static void queue(float* sum, u64 a, const u32* held, u64 b, int more) {
        Queued made{sum, N, a, b, REGISTERS, TURNED, more != 0, EIGHT, {}};
        if (REGISTERS) std::memcpy(made.held, held, sizeof made.held);
        cluster->now->products.push_back(made);
    }
};
template <int N> struct Mma { static void add(float (&s)[N / 2], u64 a, u64 b, int more) { Instruction<N, false, false>::queue(s, a, nullptr, b, more); } };
template <int N> struct Deep { static void add(float (&s)[N / 2], const u32* a, u64 b, int more) { Instruction<N, true, false>::queue(s, 0, a, b, more); } };
template <int N> struct Eight { static void add(float (&s)[N / 2], u64 a, u64 b, int more) { Instruction<N, false, false, true>::queue(s, a, nullptr, b, more); } };
template <int N> struct Turned { static void add(float (&s)[N / 2], u64 a, u64 b, int more) { Instruction<N, false, true>::queue(s, a, nullptr, b, more); } };
template <int N> struct Wide { static void add(float (&s)[N / 2], const u32* a, u64 b, int more) { Instruction<N, true, true>::queue(s, 0, a, b, more); } };

inline float value(const Block& block, u32 at) {
    at = swizzled(at);
    if (at + 2 > block.memory.size()) fail("a product reads outside the block's memory", at);
    uint16_t bits;
    std::memcpy(&bits, block.memory.data() + at, 2);
    return as_float(static_cast<u32>(bits) << 16);
}
inline float value_fp8(const Block& block, u32 at) {
    at = swizzled(at);
    if (at + 1 > block.memory.size()) fail("a product reads outside the block's memory", at);
    u32 bits = static_cast<unsigned char>(block.memory[at]), power = bits >> 3 & 15, rest = bits & 7;
    if ((bits & 127) == 127) return std::nanf("");
    float size = power ? std::ldexp(8.0f + rest, static_cast<int>(power) - 10) : std::ldexp(static_cast<float>(rest), -9);
    return bits >> 7 ? -size : size;
}
inline u32 start_of(u64 matrix) {
    if ((matrix >> 32 & 0x3fff) != 64 || matrix >> 62 != 1) fail("descriptor: wanted swizzle of 128 bytes, groups of 1024", matrix >> 32);
    return (matrix & 0x3fff) << 4;
}
// One instruction of a warpgroup. :param group: its 128 threads, which have all queued it. Rows are in the threads' registers
// as the hardware has them: thread `lane` of warp w holds rows 16 w + lane / 4 and 8 below, of every 8 columns two.
inline void multiply(Thread* group, size_t i) {
    const Queued& p = group->products[i];
    const Block& block = *group->block;
    u32 far = (p.b >> 16 & 0x3fff) << 4, b_at = start_of(p.b);
    const int count = p.eight ? 32 : 16;
    auto at = [&](u32 place, int k) { return p.eight ? value_fp8(block, place + k) : value(block, place + k * 2); };
    std::vector<float> a(64 * count), b(count * p.width);
    for (int row = 0; row < 64; ++row)
        for (int k = 0; k < count; ++k) {
            if (!p.in_registers) {
                a[row * count + k] = at(start_of(p.a) + row / 8 * 1024 + row % 8 * 128, k);
                continue;
            }
            u32 both = group[row / 16 * 32 + row % 8 * 4 + k % 8 / 2].products.at(i).held[row % 16 / 8 + k / 8 * 2];
            a[row * count + k] = as_float(k % 2 ? both & 0xffff0000u : both << 16);
        }
    for (int n = 0; n < p.width; ++n)
        for (int k = 0; k < count; ++k) {
            u32 turned = n / 64 * far + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2, plain = n / 8 * 1024 + n % 8 * 128;
            b[n * count + k] = p.turned ? value(block, b_at + turned) : at(b_at + plain, k);
        }
    for (int row = 0; row < 64; ++row)
        for (int n = 0; n < p.width; ++n) {
            const Queued& theirs = group[row / 16 * 32 + row % 8 * 4 + n % 8 / 2].products.at(i);
            if (theirs.b != p.b || theirs.a != p.a) fail("threads of a warpgroup ask for different products", row, n);
            float& sum = theirs.sum[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
            float found = p.more ? sum : 0.0f;
            for (int k = 0; k < count; ++k) found += a[row * count + k] * b[n * count + k];
            sum = found;
        }
}
inline void open_products() {}
inline void commit_products() { cluster->now->committed.push_back(cluster->now->products.size()); }
template <int LEFT>
void wait_products() {
    Thread& mine = *cluster->now;
    Gate& group = own().groups[mine.index.x / 128];
    size_t left = mine.committed.size() > LEFT ? mine.committed.size() - LEFT : 0, count = left ? mine.committed[left - 1] : 0;
    pass(group, "a warpgroup's products");
    if (mine.index.x % 128 == 0)
        for (size_t i = 0; i < count; ++i) multiply(&mine, i);
    pass(group, "a warpgroup's products");
    mine.products.erase(mine.products.begin(), mine.products.begin() + count);
    mine.committed.erase(mine.committed.begin(), mine.committed.begin() + left);
    for (size_t& each : mine.committed) each -= count;
}

inline u32 pack(float low, float high) {
    auto round = [](float v) { u32 b = as_bits(v); return std::isnan(v) ? 0x7fffu : (b + 0x7fff + (b >> 16 & 1)) >> 16; };
    return round(low) | round(high) << 16;
}
inline u32 pack_fp8(float a, float b, float c, float d) {
    auto code = [](float v) -> u32 {
        if (std::isnan(v)) return 0x7f;
        float size = min(std::fabs(v), 448.0f);
        int power = size < 0.015625f ? -6 : std::ilogb(size);  // below 2^-6 steps stay what they are there
        u32 steps = std::nearbyint(std::ldexp(size, 3 - power));  // 3 bits behind the point; 8 of them where normal
        return (std::signbit(v) ? 0x80u : 0u) | ((power + 6) * 8 + steps);  // 16 carry into the exponent
    };
    return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}
inline float power_of_two(float x) { return std::exp2(x); }

// --- a launch ---

template <class... P, size_t... I>
void unpack(void (*kernel)(P...), void** args, std::index_sequence<I...>) { kernel(*static_cast<std::remove_const_t<P>*>(args[I])...); }
template <class... P>
void call(void (*kernel)(P...), void** args) { unpack(kernel, args, std::index_sequence_for<P...>{}); }

inline void enter_thread() {
    cluster->entry();
    for (auto& group : cluster->now->copies)
        if (!group.empty()) fail("a thread ends before its copies");
    cluster->now->done = true;
    swapcontext(&cluster->now->context, &cluster->scheduler);
}

inline void run_cluster() {
    Cluster& c = *cluster;
    std::vector<Thread*> order;
    for (Thread& thread : c.threads) order.push_back(&thread);
    for (size_t left = order.size(); left;) {
        bool moved = false;
        std::shuffle(order.begin(), order.end(), c.chance);
        for (Thread* thread : order) {
            if (thread->done || (thread->may && !thread->may())) continue;
            if (thread->index.x / 128 == thread->block->lazy && c.chance() % 16) { moved = true; continue; }
            moved = true, thread->may = nullptr, c.now = thread;
            swapcontext(&c.scheduler, &thread->context);
            c.now = nullptr;
            if (!failure.empty()) throw Failed{};
            left -= thread->done;
        }
        std::vector<std::function<void()>> later;
        auto coming = std::move(c.under_way);
        c.under_way.clear();
        std::shuffle(coming.begin(), coming.end(), c.chance);
        for (auto& each : coming) {
            if (c.chance() % 2) later.push_back(each);
            else each(), moved = true;
        }
        for (auto& each : c.under_way) later.push_back(each);
        c.under_way = std::move(later);
        if (!moved && c.under_way.empty() && left) {
            for (Thread* thread : order) if (!thread->done) fail(thread->why, thread->block->index.x, thread->index.x);
        }
    }
    if (!c.under_way.empty()) fail("a block ends while something is still written into the cluster");
    for (Block& block : c.blocks)
        for (auto& [at, barrier] : block.barriers) if (!barrier.done) fail("a barrier was never through", at, barrier.missing);
}

// :return: why it failed, null where it did not.
inline const char* launch(const std::function<void()>& entry, Index grid, int threads, int size, int shared, u32 seed) {
    failure.clear();
    for (int y = 0; y < grid.y; ++y)
        for (int x = 0; x < grid.x; x += size) {
            Cluster made;
            cluster = &made, made.chance.seed(seed + x), made.entry = entry, made.block_count = grid, made.threads_of_block = {threads, 1, 1};
            made.blocks.resize(size), made.threads = std::vector<Thread>(size * threads), made.gate.wanted = size * threads;
            for (int b = 0; b < size; ++b) {
                Block& block = made.blocks[b];
                block.lazy = made.chance() % (threads / 128 + 1);
                block.index = {x + b, y, 0}, block.threads = threads, block.all.wanted = threads;
                block.memory.assign(BASE + shared, char(0xff)), block.lanes.resize(2 * threads);
                block.warps.assign(threads / 32, Gate{32}), block.groups.assign(threads / 128, Gate{128});
                for (int t = 0; t < threads; ++t) {
                    Thread& thread = made.threads[b * threads + t];
                    thread.index = {t, 0, 0}, thread.block = &block, thread.stack.reset(new char[1 << 16]);
                    getcontext(&thread.context);
                    thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = 1 << 16, thread.context.uc_link = nullptr;
                    makecontext(&thread.context, enter_thread, 0);
                }
            }
            try {
                run_cluster();
            } catch (Failed) {
                return failure.c_str();
            }
        }
    return nullptr;
}
