// Attention of every query over every key, one block for 64 * GROUPS queries of a head: its keys and values stand in shared
// memory as a whole, a row's logits in registers. For towers whose heads have few columns, such as 256 patches.

// Heads of DIM values, at most 128, and at most KEYS columns. A warpgroup has 64 queries.
template <int DIM, int KEYS, int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS) attend_all(Slab query, Slab keys, Slab values, u16* out, int queries, int columns, int heads, float scale) {
    constexpr int CHUNKS = DIM / 8, INNER = (DIM + 15) / 16, PANELS = (INNER + 3) / 4, ROWS = 64 * GROUPS, THREADS = 128 * GROUPS;
    static_assert(DIM % 8 == 0 && DIM <= 128 && KEYS % 16 == 0 && KEYS <= 256, "a head's rows are whole chunks");
    extern __shared__ char chip[];
    start_next();
    u32 q = shared_at(chip) + (1024 - shared_at(chip) % 1024) % 1024, k = q + PANELS * ROWS * ROW, v = k + PANELS * KEYS * ROW;
    int pair = blockIdx.y, batch = pair / heads, head = pair % heads, begin = blockIdx.x * ROWS, count = min(ROWS, queries - begin);
    auto bring_rows = [&](u32 to, int rows, const Slab& from, int first, int until) {
        const u16* at = from.at + batch * from.batch + head * from.head + first * from.column;
        for (int i = threadIdx.x; i < until * CHUNKS; i += THREADS) copy16(to + chunk_at(rows, i / CHUNKS, i % CHUNKS), at + i / CHUNKS * from.column + i % CHUNKS * 8);
    };
    // The matrix instruction takes 16 values at a time: beyond an odd count of chunks both sides hold 0, or NaN would stay NaN.
    if (CHUNKS % 2)
        for (int r = threadIdx.x; r < ROWS + KEYS; r += THREADS) clear16(r < ROWS ? q + chunk_at(ROWS, r, CHUNKS) : k + chunk_at(KEYS, r - ROWS, CHUNKS));
    for (int i = threadIdx.x + columns * CHUNKS; i < KEYS * CHUNKS; i += THREADS) clear16(v + chunk_at(KEYS, i / CHUNKS, i % CHUNKS));
    wait_for_last();
    bring_rows(q, ROWS, query, begin, count);
    bring_rows(k, KEYS, keys, 0, columns);
    commit_copies();
    bring_rows(v, KEYS, values, 0, columns);
    commit_copies();
    wait_copies<1>();
    publish();
    __syncthreads();

    int group = threadIdx.x / 128, row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float logit[KEYS / 2], peak[2] = {NONE, NONE}, weight[2] = {0, 0};
    u32 share[KEYS / 4];
    multiply_keys<KEYS, INNER>(logit, q + group * 64 * ROW, ROWS, k);
    weigh<KEYS>(logit, scale, columns, peak, weight, share);
    wait_copies<0>();
    publish();
    __syncthreads();
    float sum[DIM / 2];
    multiply_values<DIM, KEYS, false>(sum, share, v);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        bool there = row + h * 8 < count;
        float f = 1.0f / weight[h];
        u16* to = out + (static_cast<i64>(batch * queries + begin + row + h * 8) * heads + head) * DIM;
        auto word = [&](int chunk) { return pack(sum[4 * chunk + 2 * h] * f, sum[4 * chunk + 2 * h + 1] * f); };
#pragma unroll
        for (int j = 0; j + 4 <= CHUNKS; j += 4) {
            uint4 whole = gather(word(j), word(j + 1), word(j + 2), word(j + 3));
            if (there) *reinterpret_cast<uint4*>(to + (j + threadIdx.x % 4) * 8) = whole;
        }
#pragma unroll
        for (int j = CHUNKS / 4 * 4; j < CHUNKS; ++j)
            if (there) *reinterpret_cast<u32*>(to + j * 8 + threadIdx.x % 4 * 2) = word(j);
    }
}

// Attention of many packed queries (row r is query r % queries of head r / queries) over a slab of keys, 64 of them a block. Heads
// of 256. Two warpgroups take the tiles of 64 columns in turns, so that one multiplies while the other weighs, each with sums of
// its own, which are added at the end. Three tiles stand in shared memory; who has read one asks for the third behind it. CODED:
// the result, rounded to bfloat16, is coded as e4m3; else `centre` [heads * 256] and `inverse` are not read.
template <int MOST, bool CODED>
__global__ void __launch_bounds__(256) attend_long(
    const __grid_constant__ Map query, const __grid_constant__ Map keys, const __grid_constant__ Map values, const i64* lengths, u16* out,
    int queries, int group, int kv_heads, int columns, float scale, const float* centre, const float* inverse) {
    constexpr int DIM = 256, TILE = 64, BYTES = 64 * DIM * 2, SLOTS = 3, PITCH = DIM / 2 + 4;  // floats of a row of sums
    extern __shared__ char chip[];
    start_next();
    u32 q = shared_at(chip) + (1024 - shared_at(chip) % 1024) % 1024, slots = q + BYTES, notes = slots + SLOTS * 2 * BYTES;
    u32 barriers = notes + 2 * 64 * 8;  // of the queries, of each tile
    int pair = blockIdx.y, batch = pair / kv_heads, kv = pair % kv_heads, packed = group * queries, begin = blockIdx.x * 64;
    int length = lengths ? min(columns, static_cast<int>(lengths[batch])) : columns, tiles = min((length + TILE - 1) / TILE, MOST);
    auto bring_tile = [&](int t) {
        u32 to = slots + t % SLOTS * 2 * BYTES, barrier = barriers + 8 + t * 8;
        expect(barrier, 2 * BYTES);
        for (int p = 0; p < 4; ++p) bring(to + p * TILE * ROW, keys, p * 64, pair * columns + t * TILE, barrier);
        for (int p = 0; p < 4; ++p) bring(to + BYTES + p * TILE * ROW, values, p * 64, pair * columns + t * TILE, barrier);
    };
    if (threadIdx.x == 0) {
        fetch_map(query), fetch_map(keys), fetch_map(values);
        for (int i = 0; i <= tiles; ++i) make_barrier(barriers + i * 8, 1);
        show_barriers();
        publish();
    }
    if constexpr (CODED) {  // nobody writes the code: the end finds it in the L2 cache
        int first = kv * group + begin / queries, last = kv * group + min(begin + 63, packed - 1) / queries;
        for (int i = first * DIM + threadIdx.x * 32; i < (last + 1) * DIM; i += blockDim.x * 32) ask_ahead(centre + i);
        ask_ahead(inverse);
    }
    __syncthreads();
    wait_for_last();
    if (threadIdx.x == 0) {
        expect(barriers, BYTES);
        for (int p = 0; p < 4; ++p) bring(q + p * 64 * ROW, query, p * 64, pair * packed + begin, barriers);
        for (int t = 0; t < min(tiles, SLOTS); ++t) bring_tile(t);
    }

    int own = threadIdx.x / 128, lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float sum[DIM / 2] = {}, peak[2] = {NONE, NONE}, weight[2] = {0, 0};
    wait_bytes(barriers);
    for (int t = own; t < tiles; t += 2) {
        u32 k = slots + t % SLOTS * 2 * BYTES, v = k + BYTES;
        int left = length - t * TILE;
        wait_bytes(barriers + 8 + t * 8);
        if (left < TILE) {  // nobody's columns: 0, or NaN times 0 would be NaN
            for (int i = threadIdx.x % 128; i < (TILE - left) * (DIM / 8); i += 128) clear16(v + chunk_at(TILE, left + i / (DIM / 8), i % (DIM / 8)));
            publish();
            meet_group();
        }
        float logit[TILE / 2], before[2] = {peak[0], peak[1]}, added[2] = {0, 0};
        u32 share[TILE / 4];
        multiply_keys<TILE, DIM / 16>(logit, q, 64, k);
        weigh<TILE>(logit, scale, left, peak, added, share);
        float shrink[2] = {power_of_two(before[0] - peak[0]), power_of_two(before[1] - peak[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h) weight[h] = weight[h] * shrink[h] + added[h];
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) sum[i] *= shrink[i / 2 % 2];
        multiply_values<DIM, TILE, true>(sum, share, v);
        meet_group();
        if (threadIdx.x % 128 == 0 && t + SLOTS < tiles) bring_tile(t + SLOTS);
    }

    // Each warpgroup ends half of the head: it gives the other half of its sums away.
    __syncthreads();  // all tiles were read
    u32 given = slots + own * 64 * PITCH * 4, got = slots + (1 - own) * 64 * PITCH * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8;
        if (lane % 4 == 0) write2(notes + (own * 64 + r) * 8, peak[h], weight[h]);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float a = own ? sum[4 * j + 2 * h] : sum[64 + 4 * j + 2 * h], b = own ? sum[4 * j + 2 * h + 1] : sum[64 + 4 * j + 2 * h + 1];
            write2(given + (r * PITCH + j * 8 + lane % 4 * 2) * 4, a, b);
        }
    }
    float factor = CODED ? *inverse : 0.0f;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8, place = begin + r;
        float2 note = read2(notes + ((1 - own) * 64 + r) * 8);
        float top = fmaxf(peak[h], note.x), mine = power_of_two(peak[h] - top), theirs = power_of_two(note.x - top);
        float f = 1.0f / (mine * weight[h] + theirs * note.y);
        mine *= f, theirs *= f;
        auto word = [&](int j) {
            float2 part = read2(got + (r * PITCH + j * 8 + lane % 4 * 2) * 4);
            float a = own ? sum[64 + 4 * j + 2 * h] : sum[4 * j + 2 * h], b = own ? sum[64 + 4 * j + 2 * h + 1] : sum[4 * j + 2 * h + 1];
            return pack(a * mine + part.x * theirs, b * mine + part.y * theirs);
        };
        i64 to = static_cast<i64>(batch * queries + place % queries) * (kv_heads * group) + kv * group + place / queries;
        float4 middle[CODED ? 8 : 1];
        if constexpr (CODED) {  // before the first store, or each would be waited for by itself
            const float* from = centre + (kv * group + min(place, packed - 1) / queries) * DIM + own * (DIM / 2) + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) middle[i] = load4(from + i / 2 * 32 + i % 2 * 4);
        }
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            uint4 whole = gather(word(j), word(j + 1), word(j + 2), word(j + 3));
            if constexpr (CODED) {
                uint2 code = {encode(apart(whole.x, whole.y), middle[j / 2], factor), encode(apart(whole.z, whole.w), middle[j / 2 + 1], factor)};
                if (place < packed) *reinterpret_cast<uint2*>(reinterpret_cast<char*>(out) + to * DIM + own * (DIM / 2) + (j + lane % 4) * 8) = code;
            } else {
                if (place < packed) *reinterpret_cast<uint4*>(out + to * DIM + own * (DIM / 2) + (j + lane % 4) * 8) = whole;
            }
        }
    }
}
