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
    open_products();
#pragma unroll
    for (int i = 0; i < INNER; ++i)
        Mma<KEYS>::add(logit, panels(q + i / 4 * ROWS * ROW + group * 64 * ROW + i % 4 * 32), panels(k + i / 4 * KEYS * ROW + i % 4 * 32), i > 0);
    commit_products();
    wait_products<0>();
    weigh<KEYS>(logit, scale, columns, peak, weight, share);
    wait_copies<0>();
    publish();
    __syncthreads();
    float sum[DIM / 2];
    open_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) Wide<DIM>::add(sum, share + 4 * i, panels(v + i * 2048, KEYS * ROW), i > 0);
    commit_products();
    wait_products<0>();
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
