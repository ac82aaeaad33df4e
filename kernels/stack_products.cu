// The products of a layer with at most 64 rows: one cluster of CL blocks computes N outputs of all rows, each block with K
// of the inputs. The blocks send one another their sums, rounded (the way between blocks is what a product waits for longest),
// each ends some of the rows and adds them in a fixed order: no second kernel, the same bits in each run. A norm is no kernel
// either. Its producer leaves x * (1 + scale) and, per row, sums of x * x; its consumer multiplies its product by 1 / rms(x)
// and adds shift @ W, which was made at load. Operands are bfloat16, or e4m3 (BYTES 1; reference.stack_fp8).
//
// Weights come while the kernel in front runs, as far as shared memory holds both: from tile EARLY on it does not, and a block
// brings x and its weights in turns. LATE: the next kernel starts when this one has its operands, or its weights come first.

template <int N, int K, int CL, int GROUPS, int ROWS, int LATE, int EARLY, int BYTES>
struct Product {
    static constexpr int THREADS = 128 * GROUPS, WIDE = ROW / BYTES, PANELS = K / WIDE, EACH = (ROWS + CL - 1) / CL;
    static constexpr int STAGES = PANELS >= 4 ? 4 : PANELS, BARRIERS = (STAGES + 2) / 2 * 16;  // a barrier each, and of the sums; bytes
    static constexpr int PITCH = N + 8;  // values of a row of sums; the rows of a store begin in other banks
    static constexpr int EVERY = PANELS / STAGES, SLOT = EACH * PITCH * 2, W_BYTES = PANELS * N * ROW;
    static constexpr int X_BYTES = PANELS * ROWS * ROW + (64 - ROWS) * ROW;  // 64 rows are read
    static_assert(PANELS % STAGES == 0, "a stage is whole panels");
    static_assert(N % 8 == 0 && SLOT % 16 == 0, "sums go in chunks of 16 bytes");

    static constexpr int TURNS = (EACH * 16 + THREADS - 1) / THREADS;  // of sixteen threads a row

    u32 w, x, inbox, barriers;  // panels of the weight and of x; all blocks' sums of own rows; of each stage, of the sums
    float *factor, *marks, square[TURNS];
    int rank, tile, first, last;  // of the cluster; rows that this block ends

    __device__ Product(char* chip, const Map& x_map, const Map& weight, int rows) {
        u32 up = (1024 - shared_at(chip) % 1024) % 1024;
        w = shared_at(chip) + up;
        x = w + W_BYTES;
        inbox = x + X_BYTES;
        barriers = inbox + CL * SLOT;
        factor = reinterpret_cast<float*>(chip + up + W_BYTES + X_BYTES + CL * SLOT + BARRIERS);
        marks = factor + 64;
        rank = blockIdx.x % CL;
        tile = blockIdx.x / CL;
        int each = (rows + CL - 1) / CL;
        first = min(rank * each, rows);
        last = min(first + each, rows);
        if (threadIdx.x == 0) {
            fetch_map(weight);
            for (int stage = 0; stage < STAGES; ++stage) make_barrier(barriers + stage * 8, 2);  // its weights, its x
            make_barrier(sums(), 1);
            show_barriers();
            publish();  // to the copy engine too, which is started before the threads meet
            for (int stage = 0; stage < STAGES; ++stage) expect(barriers + stage * 8, EVERY * N * ROW);
            expect(sums(), CL * (last - first) * N * 2);
            fetch_map(x_map);
        }
    }

    __device__ void open() {  // once the weights are under way: all threads see the barriers
        __syncthreads();
        ready();
    }

    __device__ bool early() const { return tile < EARLY; }
    __device__ u32 sums() const { return barriers + STAGES * 8; }

    // Of the weight, BOXES boxes a panel. By one thread. :param row_of: a box's first row of the weight.
    template <int BOXES, class Rows>
    __device__ void bring_weights(const Map& map, Rows row_of, int stage) {
        for (int p = stage * EVERY; p < (stage + 1) * EVERY; ++p)
            for (int box = 0; box < BOXES; ++box)
                bring(w + (p * N + box * (N / BOXES)) * ROW, map, rank * K + p * WIDE, row_of(box), barriers + stage * 8);
    }

    __device__ void bring_rows(const Map& map, int stage) {
        expect(barriers + stage * 8, EVERY * ROWS * ROW);
        for (int p = stage * EVERY; p < (stage + 1) * EVERY; ++p) bring(x + p * ROWS * ROW, map, rank * K + p * WIDE, 0, barriers + stage * 8);
    }

    // All blocks' sums of this block's rows come into the inbox. :param later, bytes: what a later kernel reads, this block's part;
    // asked for when no weight of this one is under way any more.
    template <bool NORMED>
    __device__ void multiply(int rows, float eps = 0, const char* later = nullptr, int bytes = 0) {
        float sum[N / GROUPS / 2];
        u32 mine = (threadIdx.x / 128) * (N / GROUPS) * ROW;
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            if (p % EVERY == 0) wait_bytes(barriers + p / EVERY * 8);
            if (p == 0) STAMP(3);
            open_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u64 a = panels(x + p * ROWS * ROW + k * 32), b = panels(w + p * N * ROW + mine + k * 32);
                if constexpr (BYTES == 1) Eight<N / GROUPS>::add(sum, a, b, p + k > 0);
                else Mma<N / GROUPS>::add(sum, a, b, p + k > 0);
            }
            commit_products();
        }
        if (LATE) start_next();
        if (later && threadIdx.x == 0) ask_ahead(later + static_cast<i64>(blockIdx.x) * bytes, bytes);
        if (NORMED) make_factors(eps);
        wait_products<0>();
        STAMP(4);
        int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane / 4, each = (rows + CL - 1) / CL;
        int upper = min(r / each, CL - 1), lower = min((r + 8) / each, CL - 1);
        u32 at = inbox + rank * SLOT + threadIdx.x / 128 * (N / GROUPS) * 2;
        u32 to[2] = {in_block(at + r % each * PITCH * 2, upper), in_block(at + (r + 8) % each * PITCH * 2, lower)};
        u32 told[2] = {in_block(sums(), upper), in_block(sums(), lower)};
        constexpr int CHUNKS = N / GROUPS / 8;  // of 8 outputs of a row: four threads hold two each
        meet();                                 // all blocks live, and their barriers
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            bool there = r + h * 8 < rows;
            auto word = [&](int chunk) { return pack(sum[4 * chunk + 2 * h], sum[4 * chunk + 2 * h + 1]); };
#pragma unroll
            for (int j = 0; j + 4 <= CHUNKS; j += 4) {
                uint4 whole = gather(word(j), word(j + 1), word(j + 2), word(j + 3));
                if (there) send16(to[h] + (j + lane % 4) * 16, whole, told[h]);
            }
#pragma unroll
            for (int j = CHUNKS / 4 * 4; j < CHUNKS; ++j)
                if (there) send1(to[h] + j * 16 + lane % 4 * 4, word(j), told[h]);
        }
        wait_bytes(sums());
        __syncthreads();  // and the factors are there
        STAMP(5);
    }

    // Four outputs of one of this block's rows, all inputs.
    __device__ float4 total(int r, int c) {
        u32 at = inbox + (r * PITCH + c) * 2;
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < CL; ++i) {
            uint2 part = read8(at + i * SLOT);
            sum.x += low_of(part.x), sum.y += high_of(part.x), sum.z += low_of(part.y), sum.w += high_of(part.y);
        }
        return sum;
    }

    // Sums of squares of this block's rows, for make_factors(): only asked for, since nothing needs them before the end. :param
    // squares: [rows, parts].
    __device__ void ask_squares(const float* squares, int parts) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) square[i] = 0;
        for (int part = threadIdx.x % 16; part < parts; part += 16) {
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                int r = first + threadIdx.x / 16 + i * (THREADS / 16);
                if (r < last) square[i] += squares[r * parts + part];
            }
        }
    }

    // 1 / rms of this block's rows, into shared memory.
    __device__ void make_factors(float eps) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            int r = threadIdx.x / 16 + i * (THREADS / 16);
#pragma unroll
            for (int far = 8; far; far /= 2) square[i] += __shfl_xor_sync(~0u, square[i], far);
            if (threadIdx.x % 16 == 0 && first + r < last) factor[r] = rsqrtf(square[i] / (K * CL) + eps);
        }
    }
};

// QKV: x [rows, K * CL] before its factor; K and V into their slab; queries [B, heads, tokens, 2 * HALF], as attention's threads
// want them: of each 32 values the pair i goes to place i % 4 * 4 + i / 4. A tile holds N / 2 rotary pairs, of one head or of
// two: their first columns, then their second, in boxes of 8.
template <int N, int K, int CL, int GROUPS, int ROWS, int LATE, int EARLY, int BYTES, int HALF>
__global__ void __launch_bounds__(128 * GROUPS) project_rotate(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const float* squares, const float* shift, Coded coded,
    const float* cos, const float* sin, u16* query, Slab keys, Slab values, const i64* start, int rows,
    int tokens, int heads, int kv_heads, int columns, int parts, float eps) {
    static_assert(N % 16 == 0 && HALF % 8 == 0, "a box's pairs are of one head");
    extern __shared__ char chip[];
    if (!LATE) start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, LATE, EARLY, BYTES> p(chip, x, weight, rows);
    int begin = p.tile * (N / 2);  // of all heads' pairs
    auto row_of = [=](int pair) { return pair / HALF * 2 * HALF + pair % HALF; };
    constexpr int BOX = HALF % (N / 2) ? 8 : N / 2, BOXES = N / BOX;
    auto first_of = [=](int box) { return row_of(begin + box % (BOXES / 2) * BOX) + box / (BOXES / 2) * HALF; };
    if (threadIdx.x == 0 && p.early())
        for (int stage = 0; stage < p.STAGES; ++stage) p.template bring_weights<BOXES>(weight, first_of, stage);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 8) + p.THREADS - 1) / p.THREADS;
    float4 c[ITEMS], s[ITEMS], low_shift[ITEMS] = {}, high_shift[ITEMS] = {};
    Scales low_scales[ITEMS], high_scales[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, r = p.first + item / (N / 8), pair = begin + item % (N / 8) * 4;
        if (r >= p.last) continue;
        c[i] = load4(cos + r * HALF + pair % HALF), s[i] = load4(sin + r * HALF + pair % HALF);
        if (pair >= (heads + 2 * kv_heads) * HALF) continue;
        if constexpr (BYTES == 1) low_scales[i] = coded.at(row_of(pair)), high_scales[i] = coded.at(row_of(pair) + HALF);
        if (shift) low_shift[i] = load4(shift + row_of(pair)), high_shift[i] = load4(shift + row_of(pair) + HALF);
    }
    STAMP(1);
    wait_for_last();
    STAMP(2);
    if (threadIdx.x == 0)
        for (int stage = 0; stage < p.STAGES; ++stage) {
            p.bring_rows(x, stage);
            if (!p.early()) p.template bring_weights<BOXES>(weight, first_of, stage);
        }
    p.ask_squares(squares, parts);
    p.template multiply<true>(rows, eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 8), r = p.first + own, pair = begin + item % (N / 8) * 4;
        int head = pair / HALF, at = pair % HALF;
        if (r >= p.last || head >= heads + 2 * kv_heads) continue;
        float4 a = p.total(own, item % (N / 8) * 4), b = p.total(own, N / 2 + item % (N / 8) * 4), m = low_shift[i], n = high_shift[i];
        if constexpr (BYTES == 1) a = low_scales[i].of(a), b = high_scales[i].of(b);
        float f = p.factor[own];
        a = {a.x * f + m.x, a.y * f + m.y, a.z * f + m.z, a.w * f + m.w};
        b = {b.x * f + n.x, b.y * f + n.y, b.z * f + n.z, b.w * f + n.w};
        uint2 low = {pack(a.x, a.y), pack(a.z, a.w)}, high = {pack(b.x, b.y), pack(b.z, b.w)};
        if (head < heads + kv_heads) {
            low = {pack(a.x * c[i].x - b.x * s[i].x, a.y * c[i].y - b.y * s[i].y), pack(a.z * c[i].z - b.z * s[i].z, a.w * c[i].w - b.w * s[i].w)};
            high = {pack(b.x * c[i].x + a.x * s[i].x, b.y * c[i].y + a.y * s[i].y), pack(b.z * c[i].z + a.z * s[i].z, b.w * c[i].w + a.w * s[i].w)};
        }
        int batch = r / tokens, token = r % tokens;
        if (head < heads) {
            u16* to = query + (static_cast<i64>(batch * heads + head) * tokens + token) * 2 * HALF + at / 32 * 32;
            u32* places = reinterpret_cast<u32*>(to) + at / 2 % 4 * 4 + at % 32 / 8;
            places[0] = low.x, places[4] = low.y, places[HALF / 2] = high.x, places[HALF / 2 + 4] = high.y;
            continue;
        }
        i64 column = start[batch] + token;
        if (column < 0 || column >= columns) continue;  // a broken promise must not reach memory beside the slab
        const Slab& slab = head < heads + kv_heads ? keys : values;
        int of = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
        u16* to = slab.at + batch * slab.batch + of * slab.head + column * slab.column + at;
        *reinterpret_cast<uint2*>(to) = low;
        *reinterpret_cast<uint2*>(to + HALF) = high;
    }
    STAMP(6);
}

__device__ __forceinline__ float gelu(float g) {  // tanh form: g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
    float u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return __fdividef(g, 1.0f + power_of_two(fminf(-2.8853900817779268f * u, 126.0f)));
}

// Gate and up projection and gated GELU: out [rows, outputs]. A tile holds N / 2 gates, then their ups.
template <int N, int K, int CL, int GROUPS, int ROWS, int LATE, int EARLY, int BYTES>
__global__ void __launch_bounds__(128 * GROUPS) gated_up(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const float* squares, const float* shift, Coded coded,
    Code code, void* out, const char* later, int rows, int outputs, int parts, int bytes, float eps) {
    extern __shared__ char chip[];
    if (!LATE) start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, LATE, EARLY, BYTES> p(chip, x, weight, rows);
    int begin = p.tile * (N / 2);
    auto row_of = [=](int box) { return begin + box * outputs; };
    if (threadIdx.x == 0 && p.early())
        for (int stage = 0; stage < p.STAGES; ++stage) p.template bring_weights<2>(weight, row_of, stage);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 8) + p.THREADS - 1) / p.THREADS;
    float4 m[ITEMS] = {}, n[ITEMS] = {}, centre[ITEMS];
    Scales gate_scales[ITEMS], up_scales[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int o = begin + (threadIdx.x + i * p.THREADS) % (N / 8) * 4;
        if (o >= outputs) continue;
        if constexpr (BYTES == 1) gate_scales[i] = coded.at(o), up_scales[i] = coded.at(outputs + o), centre[i] = load4(code.centre + o);
        if (shift) m[i] = load4(shift + o), n[i] = load4(shift + outputs + o);
    }
    float inverse = BYTES == 1 ? *code.inverse : 0.0f;
    STAMP(1);
    wait_for_last();
    STAMP(2);
    if (threadIdx.x == 0)
        for (int stage = 0; stage < p.STAGES; ++stage) {
            p.bring_rows(x, stage);
            if (!p.early()) p.template bring_weights<2>(weight, row_of, stage);
        }
    p.ask_squares(squares, parts);
    p.template multiply<true>(rows, eps, later, bytes);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 8), r = p.first + own, at = item % (N / 8) * 4;
        if (r >= p.last || begin + at >= outputs) continue;
        float4 a = p.total(own, at), b = p.total(own, N / 2 + at);
        if constexpr (BYTES == 1) a = gate_scales[i].of(a), b = up_scales[i].of(b);
        float f = p.factor[own];
        float4 v = {gelu(a.x * f + m[i].x) * (b.x * f + n[i].x), gelu(a.y * f + m[i].y) * (b.y * f + n[i].y),
                    gelu(a.z * f + m[i].z) * (b.z * f + n[i].z), gelu(a.w * f + m[i].w) * (b.w * f + n[i].w)};
        i64 place = static_cast<i64>(r) * outputs + begin + at;
        if constexpr (BYTES == 1) static_cast<u32*>(out)[place / 4] = encode(v, centre[i], inverse);
        else static_cast<uint2*>(out)[place / 4] = {pack(v.x, v.y), pack(v.z, v.w)};
    }
    STAMP(6);
}

// total = stream + gate * (x @ weight.T); scaled = total * (1 + scale); squares [rows, tiles]: sums of total * total.
template <int N, int K, int CL, int GROUPS, int ROWS, int LATE, int EARLY, int BYTES>
__global__ void __launch_bounds__(128 * GROUPS) add_product(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const u16* stream, const float* gate, const float* scale,
    Coded coded, Code code, u16* total, void* scaled, float* squares, int rows, int outputs) {
    extern __shared__ char chip[];
    if (!LATE) start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, LATE, EARLY, BYTES> p(chip, x, weight, rows);
    int begin = p.tile * N;
    auto row_of = [=](int) { return begin; };
    if (threadIdx.x == 0 && p.early())
        for (int stage = 0; stage < p.STAGES; ++stage) p.template bring_weights<1>(weight, row_of, stage);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 4) + p.THREADS - 1) / p.THREADS;
    float4 open[ITEMS], gain[ITEMS], centre[ITEMS];
    Scales scales[ITEMS];
    uint2 before[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int o = begin + (threadIdx.x + i * p.THREADS) % (N / 4) * 4;
        if (o >= outputs) continue;
        gain[i] = load4(scale + o);
        if constexpr (BYTES == 1) scales[i] = coded.at(o), centre[i] = load4(code.centre + o);
        if (gate) open[i] = load4(gate + o);
    }
    float inverse = BYTES == 1 ? *code.inverse : 0.0f;
    STAMP(1);
    wait_for_last();
    STAMP(2);
    if (threadIdx.x == 0)
        for (int stage = 0; stage < p.STAGES; ++stage) {
            p.bring_rows(x, stage);
            if (!p.early()) p.template bring_weights<1>(weight, row_of, stage);
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, r = p.first + item / (N / 4), o = begin + item % (N / 4) * 4;
        if (r < p.last && o < outputs) before[i] = *reinterpret_cast<const uint2*>(stream + static_cast<i64>(r) * outputs + o);
    }
    p.template multiply<false>(rows);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 4), r = p.first + own, o = begin + item % (N / 4) * 4;
        if (r >= p.last) continue;
        float square = 0;
        if (o < outputs) {
            float4 v = p.total(own, item % (N / 4) * 4), g = gain[i];
            if constexpr (BYTES == 1) v = scales[i].of(v);
            v = {rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w)};
            if (gate)  // rounded where the reference rounds: the product, the gate, their product
                v = {rounded(rounded(open[i].x) * v.x), rounded(rounded(open[i].y) * v.y), rounded(rounded(open[i].z) * v.z),
                     rounded(rounded(open[i].w) * v.w)};
            uint2 after = {pack(low_of(before[i].x) + v.x, high_of(before[i].x) + v.y), pack(low_of(before[i].y) + v.z, high_of(before[i].y) + v.w)};
            v = {low_of(after.x), high_of(after.x), low_of(after.y), high_of(after.y)};
            square = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            i64 at = static_cast<i64>(r) * outputs + o;
            *reinterpret_cast<uint2*>(total + at) = after;
            v = {v.x * (1.0f + g.x), v.y * (1.0f + g.y), v.z * (1.0f + g.z), v.w * (1.0f + g.w)};
            if constexpr (BYTES == 1) static_cast<u32*>(scaled)[at / 4] = encode(v, centre[i], inverse);
            else static_cast<uint2*>(scaled)[at / 4] = {pack(v.x, v.y), pack(v.z, v.w)};
        }
        p.marks[item] = square;
    }
    __syncthreads();
    int r = p.first + threadIdx.x;
    if (r < p.last) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) sum += p.marks[threadIdx.x * (N / 4) + i];
        squares[r * (gridDim.x / CL) + p.tile] = sum;
    }
    STAMP(6);
}
