// Attention of few queries over a slab of keys, one launch: a cluster of CL blocks has 64 packed queries (row r is query r %
// queries of head r / queries) and CL * KEYS columns, KEYS of them a block. Each sends its part of a row to the block that
// ends it: partial sums do not go through memory. Heads of 256. Each of two warpgroups makes the shares of half of the columns,
// and multiplies all of them with half of the values.

// A warpgroup's half of this block's part of each row to the block that ends the row: rounded, and since CL parts are added, their
// error is below the result's. :param sum: of rows `row` and row + 8. :param to, barrier: where this block's parts belong there, and
// what counts them. :param first: chunk of the row.
template <int CL>
__device__ __forceinline__ void send_part(const float (&sum)[64], u32 to, u32 barrier, int row, int first) {
    constexpr int EACH = (64 + CL - 1) / CL;
    bool swapped = blockIdx.x & 1;  // half of the blocks begin with the other rows: at any time each block is written into
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        bool lower = (h == 1) != swapped;
        int r = row + lower * 8;
        u32 there = in_block(to + r % EACH * 512, r / EACH), told = in_block(barrier, r / EACH);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* at = sum + 16 * i;
            auto word = [&](int j) { return lower ? pack(at[j + 2], at[j + 3]) : pack(at[j], at[j + 1]); };
            uint4 whole = gather(word(0), word(4), word(8), word(12));
            send16(there + ((first + 4 * i + threadIdx.x % 4 ^ r % 8) << 4), whole, told);
        }
    }
}

// A warpgroup's shares of rows `row` and row + 8, as the second product reads them. :param first: chunk of 8 columns.
template <int KEYS>
__device__ __forceinline__ void write_shares(const u32 (&share)[KEYS / 4], u32 shares, int row, int first) {
    constexpr int CHUNKS = KEYS / 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8, lane = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j + 4 <= CHUNKS; j += 4)
            write16(shares + chunk_at(64, r, first + j + lane), gather(share[2 * j + h], share[2 * j + 2 + h], share[2 * j + 4 + h], share[2 * j + 6 + h]));
#pragma unroll
        for (int j = CHUNKS / 4 * 4; j < CHUNKS; ++j) write4(shares + chunk_at(64, r, first + j) + lane * 4, share[2 * j + h]);
    }
}

// The largest logit of rows `row` and row + 8, and the sum of their weights, to the blocks that end them.
template <int CL>
__device__ __forceinline__ void send_notes(const float (&peak)[2], const float (&weight)[2], u32 notes, u32 barrier, int row) {
    constexpr int EACH = (64 + CL - 1) / CL;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8;
        if (threadIdx.x % 4 == 0) send2(in_block(notes + r % EACH * 8, r / EACH), peak[h], weight[h], in_block(barrier, r / EACH));
    }
}

// The end of eight values of a row: of all blocks' parts, each over the sum of all weights. :param notes, part: of the row, of block
// 0.
template <int CL>
__device__ __forceinline__ void mix_parts(float (&mix)[8], u32 notes, u32 part) {
    constexpr int EACH = (64 + CL - 1) / CL;
    float top = NONE, all = 0;
#pragma unroll
    for (int b = 0; b < CL; ++b) top = fmaxf(top, read2(notes + b * EACH * 8).x);
#pragma unroll
    for (int b = 0; b < CL; ++b) {
        float2 note = read2(notes + b * EACH * 8);
        uint4 got = read16(part + b * EACH * 512);
        float f = power_of_two(note.x - top);
        all += f * note.y;
        mix[0] += f * low_of(got.x), mix[1] += f * high_of(got.x), mix[2] += f * low_of(got.y), mix[3] += f * high_of(got.y);
        mix[4] += f * low_of(got.z), mix[5] += f * high_of(got.z), mix[6] += f * low_of(got.w), mix[7] += f * high_of(got.w);
    }
    float f = __fdividef(1.0f, all);
#pragma unroll
    for (int i = 0; i < 8; ++i) mix[i] *= f;
}

// Of rows `row` and row + 8 what one thread of the matrix unit's wants, as project_rotate wrote it. :param left: rows that there are.
template <int DIM>
__device__ __forceinline__ void read_query(u32 (&asked)[DIM / 4], const u16* query, int row, int left) {
    const u16* at = query + static_cast<i64>(row) * DIM + threadIdx.x % 4 * 8;
#pragma unroll
    for (int g = 0; g < DIM / 32; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint4 got = {0, 0, 0, 0};
            if (row + h * 8 < left) got = *reinterpret_cast<const uint4*>(at + h * 8 * DIM + g * 32);
            asked[g * 8 + h] = got.x, asked[g * 8 + h + 2] = got.y, asked[g * 8 + h + 4] = got.z, asked[g * 8 + h + 6] = got.w;
        }
}

// Each block has an equal part of the columns that were there before, and of this step's: the first come before the wait, and
// none waits for more than its part of the others. Queries go from memory into registers: what stands in shared memory is little
// enough to be there beside the kernel in front.
template <int CL, int KEYS, int BYTES>
__global__ void __launch_bounds__(256) attend(
    const u16* query, Slab keys, Slab values, const i64* lengths, Code code, void* out,
    int queries, int group, int kv_heads, int columns, float scale) {
    constexpr int DIM = 256, CHUNKS = DIM / 8, K_BYTES = KEYS * DIM * 2, S_BYTES = (KEYS + 63) / 64 * 64 * ROW, EACH = (64 + CL - 1) / CL, OWN = KEYS / 2;
    constexpr int STEP = 256 / CHUNKS;  // rows that all threads bring at once, each thread one chunk of a row
    static_assert(CL * EACH * DIM * 2 <= K_BYTES, "what is received takes the keys' place");
    static_assert(CL * EACH <= 2 * 64, "and that of the notes");
    static_assert(EACH * CHUNKS <= 256, "a thread ends one chunk");
    static_assert(KEYS % 16 == 0, "columns go into the second product by 16, and half of them into the first by 8");
    extern __shared__ char chip[];
    STAMP(0);
    u32 k = shared_at(chip) + (1024 - shared_at(chip) % 1024) % 1024, v = k + K_BYTES, shares = v + K_BYTES;
    u32 notes = shares + S_BYTES, barrier = notes + 2 * 64 * 8;  // peak and weight of each warpgroup's rows, then of all blocks' parts of own rows
    int rank = blockIdx.x % CL, tile = blockIdx.x / CL, pair = blockIdx.y, batch = pair / kv_heads, kv = pair % kv_heads;
    int packed = group * queries, chunk = threadIdx.x % CHUNKS, lead = threadIdx.x / CHUNKS, first = rank * EACH, own = max(0, min(EACH, 64 - first));
    int length = min(columns, static_cast<int>(lengths[batch])), before = max(0, length - queries);  // columns written long ago
    int old = (before + CL - 1) / CL, fresh = (length - before + CL - 1) / CL;
    int old_at = rank * old, fresh_at = before + rank * fresh;
    old = max(0, min(old, before - old_at)), fresh = max(0, min(fresh, length - fresh_at));
    if (threadIdx.x == 0) {
        make_barrier(barrier, 1);
        show_barriers();
        expect(barrier, CL * own * (DIM * 2 + 8));
    }
    auto bring_columns = [&](u32 to, const Slab& slab, int place, int from, int count) {
        const u16* at = slab.at + batch * slab.batch + kv * slab.head + from * slab.column + chunk * 8;
        for (int i = lead; i < count; i += STEP) copy16(to + chunk_at(KEYS, place + i, chunk), at + i * slab.column);
    };
    bring_columns(k, keys, 0, old_at, old);
    bring_columns(v, values, 0, old_at, old);
    commit_copies();
    for (int r = old + fresh + lead; r < KEYS; r += STEP) clear16(v + chunk_at(KEYS, r, chunk));  // or NaN times 0 would be NaN
    // What this thread ends: a chunk of one row.
    int mine = threadIdx.x / CHUNKS, place = tile * 64 + first + mine, head = kv * group + min(place, packed - 1) / queries;
    i64 to = (static_cast<i64>(batch * queries + place % queries) * (kv_heads * group) + head) * CHUNKS + chunk;
    float4 centre[2];
    float inverse = 0;
    if constexpr (BYTES == 1)
        inverse = *code.inverse, centre[0] = load4(code.centre + head * DIM + chunk * 8), centre[1] = load4(code.centre + head * DIM + chunk * 8 + 4);
    STAMP(1);
    wait_for_last();
    STAMP(2);
    int warps = threadIdx.x / 128, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // this thread's warpgroup, and rows
    u32 asked[DIM / 4];
    const u16* rows = query + (static_cast<i64>(pair) * packed + tile * 64) * DIM;
    read_query<DIM>(asked, rows, row, packed - tile * 64);
    bring_columns(k, keys, old, fresh_at, fresh);
    commit_copies();
    bring_columns(v, values, old, fresh_at, fresh);
    commit_copies();
    if (BYTES == 1) start_next();  // not at once: its weights would come in the way of the queries, and of bfloat16 they still do
    wait_copies<1>();
    publish();
    __syncthreads();
    STAMP(3);

    float logit[OWN / 2], peak[2] = {NONE, NONE}, weight[2] = {0, 0};
    u32 share[OWN / 4];
    open_products();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) Deep<OWN>::add(logit, asked + 4 * i, panels(k + (i / 4 * KEYS + warps * OWN) * ROW + i % 4 * 32), i > 0);
    commit_products();
    wait_products<0>();
    if (BYTES == 2) start_next();
    find_peaks<OWN>(logit, scale, old + fresh - warps * OWN, peak);
    u32 noted = notes + (warps * 64 + row) * 8, theirs = notes + ((1 - warps) * 64 + row) * 8;
    if (threadIdx.x % 4 == 0) write4(noted, __float_as_uint(peak[0])), write4(noted + 8 * 8, __float_as_uint(peak[1]));
    __syncthreads();
    peak[0] = fmaxf(peak[0], read1(theirs)), peak[1] = fmaxf(peak[1], read1(theirs + 8 * 8));
    make_shares<OWN>(logit, scale, peak, weight, share);
    write_shares<OWN>(share, shares, row, warps * (OWN / 8));
    if (threadIdx.x % 4 == 0) write4(noted + 4, __float_as_uint(weight[0])), write4(noted + 8 * 8 + 4, __float_as_uint(weight[1]));
    wait_copies<0>();
    publish();
    __syncthreads();
    weight[0] += read1(theirs + 4), weight[1] += read1(theirs + 8 * 8 + 4);
    ready();  // keys and notes were read: their place may be written
    float sum[DIM / 4];
    open_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i)
        Turned<DIM / 2>::add(sum, panels(shares + i / 4 * 64 * ROW + i % 4 * 32), panels(v + warps * 2 * KEYS * ROW + i * 2048, KEYS * ROW), i > 0);
    commit_products();
    wait_products<0>();
    STAMP(4);
    meet();
    send_part<CL>(sum, k + rank * EACH * 512, barrier, row, warps * (CHUNKS / 2));
    if (warps == 0) send_notes<CL>(peak, weight, notes + rank * EACH * 8, barrier, row);
    wait_bytes(barrier);
    STAMP(5);
    if (mine < own && place < packed) {
        float mix[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        mix_parts<CL>(mix, notes + mine * 8, k + mine * 512 + ((chunk ^ (first + mine) % 8) << 4));
        uint4 whole = {pack(mix[0], mix[1]), pack(mix[2], mix[3]), pack(mix[4], mix[5]), pack(mix[6], mix[7])};
        if constexpr (BYTES == 1)
            static_cast<uint2*>(out)[to] = {encode(apart(whole.x, whole.y), centre[0], inverse), encode(apart(whole.z, whole.w), centre[1], inverse)};
        else
            static_cast<uint4*>(out)[to] = whole;
    }
    STAMP(6);
}
