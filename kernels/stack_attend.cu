// Attention of few queries over a slab of keys, one launch: a cluster of CL blocks has 64 packed queries (row r is query r %
// queries of head r / queries) and CL * KEYS columns, KEYS of them a block. Each sends its part of a row to the block that
// ends it: partial sums do not go through memory. Heads of 256. One warpgroup: a row's shares stay in registers, where the
// second product wants them.

// This block's part of each row to the block that ends the row: rounded, and since CL parts are added, their error is below
// the result's. :param sum: of rows `row` and row + 8. :param to, barrier: where this block's parts belong there, and what
// counts them.
template <int CL>
__device__ __forceinline__ void send_part(const float (&sum)[128], u32 to, u32 barrier, int row) {
    constexpr int EACH = 64 / CL;
    bool swapped = blockIdx.x & 1;  // half of the blocks begin with the other rows: at any time each block is written into
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        bool lower = (h == 1) != swapped;
        int r = row + lower * 8;
        u32 there = in_block(to + r % EACH * 512, r / EACH), told = in_block(barrier, r / EACH);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* at = sum + 16 * i;
            auto word = [&](int j) { return lower ? pack(at[j + 2], at[j + 3]) : pack(at[j], at[j + 1]); };
            uint4 whole = gather(word(0), word(4), word(8), word(12));
            send16(there + ((4 * i + threadIdx.x % 4 ^ r % 8) << 4), whole, told);
        }
    }
}

// The largest logit of rows `row` and row + 8, and the sum of their weights, to the blocks that end them.
template <int CL>
__device__ __forceinline__ void send_notes(const float (&peak)[2], const float (&weight)[2], u32 notes, u32 barrier, int row) {
    constexpr int EACH = 64 / CL;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8;
        if (threadIdx.x % 4 == 0) send2(in_block(notes + r % EACH * 8, r / EACH), peak[h], weight[h], in_block(barrier, r / EACH));
    }
}

// One row's end: eight values, of all blocks' parts. :param notes, part: of the row, of block 0. :return: the values, each
// over the sum of all weights.
template <int CL>
__device__ __forceinline__ void mix_parts(float (&mix)[8], u32 notes, u32 part) {
    constexpr int EACH = 64 / CL;
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
    float f = 1.0f / all;
#pragma unroll
    for (int i = 0; i < 8; ++i) mix[i] *= f;
}

template <int CL, int KEYS>
__global__ void __launch_bounds__(128) attend(
    const u16* query, Slab keys, Slab values, const i64* lengths, u16* out, int queries,
    int group, int kv_heads, int columns, float scale) {
    constexpr int DIM = 256, CHUNKS = DIM / 8, Q_BYTES = 64 * DIM * 2, K_BYTES = KEYS * DIM * 2, EACH = 64 / CL;
    constexpr int STEP = 128 / CHUNKS;  // rows that all threads bring at once, each thread one chunk of a row
    static_assert(CL * EACH * DIM * 2 <= K_BYTES, "what is received takes the keys' place");
    extern __shared__ char chip[];
    start_next();
    STAMP(0);
    u32 q = shared_at(chip) + (1024 - shared_at(chip) % 1024) % 1024, k = q + Q_BYTES, v = k + K_BYTES;
    u32 notes = v + K_BYTES, barrier = notes + 64 * 8;  // notes: peaks and weights of all blocks' parts of own rows
    int rank = blockIdx.x % CL, tile = blockIdx.x / CL, pair = blockIdx.y, batch = pair / kv_heads, kv = pair % kv_heads;
    int packed = group * queries, begin = rank * KEYS, chunk = threadIdx.x % CHUNKS, lead = threadIdx.x / CHUNKS;
    int length = min(columns, static_cast<int>(lengths[batch])), end = max(begin, min(begin + KEYS, length));
    int old = max(begin, min(end, length - queries));  // columns below were written long ago
    if (threadIdx.x == 0) {
        make_barrier(barrier, 1);
        show_barriers();
        expect(barrier, CL * EACH * (DIM * 2 + 8));
    }
    auto bring_columns = [&](u32 to, const Slab& slab, int from, int until) {
        const u16* at = slab.at + batch * slab.batch + kv * slab.head + chunk * 8;
        for (int column = from + lead; column < until; column += STEP)
            copy16(to + chunk_at(KEYS, column - begin, chunk), at + column * slab.column);
    };
    bring_columns(k, keys, begin, old);
    bring_columns(v, values, begin, old);
    commit_copies();
    for (int r = end - begin + lead; r < KEYS; r += STEP) clear16(v + chunk_at(KEYS, r, chunk));  // or NaN times 0 would be NaN
    STAMP(1);
    wait_for_last();
    STAMP(2);
    const u16* asked = query + (static_cast<i64>(pair) * packed + tile * 64) * DIM + chunk * 8;
    for (int r = lead; r < min(64, packed - tile * 64); r += STEP) copy16(q + chunk_at(64, r, chunk), asked + r * DIM);
    bring_columns(k, keys, old, end);
    commit_copies();
    bring_columns(v, values, old, end);
    commit_copies();
    wait_copies<1>();
    publish();
    __syncthreads();
    STAMP(3);

    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float logit[KEYS / 2], peak[2] = {NONE, NONE}, weight[2] = {0, 0};
    u32 share[KEYS / 4];
    multiply_keys<KEYS, DIM / 16>(logit, q, 64, k);
    ready();  // keys were read: their place may be written
    weigh<KEYS>(logit, scale, end - begin, peak, weight, share);
    wait_copies<0>();
    publish();
    __syncthreads();
    float sum[DIM / 2];
    multiply_values<DIM, KEYS, false>(sum, share, v);
    STAMP(4);
    meet();
    send_part<CL>(sum, k + rank * EACH * 512, barrier, row);
    send_notes<CL>(peak, weight, notes + rank * EACH * 8, barrier, row);
    wait_bytes(barrier);
    STAMP(5);
    for (int i = threadIdx.x; i < EACH * CHUNKS; i += 128) {
        int own = i / CHUNKS, r = rank * EACH + own, c = i % CHUNKS, place = tile * 64 + r;
        if (place >= packed) continue;
        float mix[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        mix_parts<CL>(mix, notes + own * 8, k + own * 512 + ((c ^ r % 8) << 4));
        i64 to = static_cast<i64>(batch * queries + place % queries) * (kv_heads * group) + kv * group + place / queries;
        *reinterpret_cast<uint4*>(out + to * DIM + c * 8) = {pack(mix[0], mix[1]), pack(mix[2], mix[3]), pack(mix[4], mix[5]), pack(mix[6], mix[7])};
    }
    STAMP(6);
}
