// Hopper's instructions as functions: all that says `asm`. What is made of them needs no more than C++, and can be run on a
// host. wgmma.py has the matrix instructions, one struct per width; the program starts with them.
//
// Every kernel is started while the one in front still runs: it brings what nobody writes, its weights, into shared
// memory, and only then waits for what the one in front computed. A kernel that has ended has waited for all before it.

__device__ __forceinline__ u32 shared_at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// What ordinary writes left in shared memory, before the matrix unit or the copy engine reads it.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- blocks of one cluster ---

// A barrier in two halves: all are ready, none has seen what another wrote.
__device__ __forceinline__ void ready() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 in_block(u32 at, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// A barrier of one warpgroup.
__device__ __forceinline__ void meet_group() { asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128 + 1) : "memory"); }

// --- barriers that count bytes ---

// :param arrivals: calls of expect() that it waits for.
__device__ __forceinline__ void make_barrier(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Of a barrier's first use. It does not say `cluster`, which would empty the L1 cache at each wait: what is waited for comes into
// this block's shared memory.
__device__ __forceinline__ void wait_bytes(u32 barrier) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}" ::"r"(barrier) : "memory");
}

// --- copies ---

struct alignas(64) Map {  // the driver's description of a matrix in memory
    u64 opaque[16];
};

// A copy's first use of a map waits for its description to come from memory.
__device__ __forceinline__ void fetch_map(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A box of a matrix, 64 columns wide, into a panel. :param column, row: its corner.
__device__ __forceinline__ void bring(u32 to, const Map& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Bytes, a multiple of 16, into the L2 cache only, for copies that come later.
__device__ __forceinline__ void ask_ahead(const char* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void ask_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }  // 128 bytes

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// --- shared memory ---

__device__ __forceinline__ float read1(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float2 read2(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint2 read8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint4 read16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void write2(u32 at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void write4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

__device__ __forceinline__ void write16(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void clear16(u32 at) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

// Into another block's shared memory, whose barrier counts it: a one-way trip, where a barrier of the cluster would wait for
// the stores to be acknowledged. :param at, barrier: as in_block gives them.
__device__ __forceinline__ void send1(u32 at, u32 v, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(at), "r"(v), "r"(barrier) : "memory");
}

__device__ __forceinline__ void send2(u32 at, float a, float b, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(at), "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void send16(u32 at, uint4 v, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
                 : "memory");
}

// --- matrix instructions ---

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>  // groups that may still be under way
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// --- numbers ---

__device__ __forceinline__ u32 pack(float low, float high) {  // two bfloat16, rounded to nearest even
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Four e4m3, a in the lowest byte: rounded to nearest even, held within 448; a NaN stays one.
__device__ __forceinline__ u32 pack_fp8(float a, float b, float c, float d) {
    u32 all;
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(all) : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
