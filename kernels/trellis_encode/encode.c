/* Finds the best trellis codes of blocks of weights on a CPU: Viterbi over 2^L states, eight blocks at a time.

   The format, and what is minimised, are described in mlxft/models/trellis. Arrays are C-contiguous:
     weights  (blocks, length) float32    codebook (2^L) float32
     overlaps (blocks) int32: the L-bits state before the first weight must end in it and the last state's low
              L-bits bits must equal it (the ring closes); -1: any start and any end
     states   (blocks, length) int32, written
     scratch  see trellis_scratch_bytes; one for each thread that calls */

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 16 /* blocks walked at once */

size_t trellis_scratch_bytes(int length, int bits, int state_bits) {
    size_t states = (size_t)1 << state_bits, overlaps = states >> bits;
    return 2 * states * LANES * sizeof(float) + (size_t)length * overlaps * LANES;
}

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t marks __attribute__((vector_size(LANES * 4)));

static vector either(marks which, vector yes, vector no) {
    return (vector)((which & (marks)yes) | (~which & (marks)no));
}

/* One weight further. before, after: costs (states) of all lanes. from: which branch won (overlaps, LANES). */
static void advance(const vector *restrict before, vector *restrict after, uint8_t *restrict from, vector weight,
                    const float *restrict codebook, int bits, int state_bits) {
    const int branches = 1 << bits, overlaps = 1 << (state_bits - bits);
    for (int overlap = 0; overlap < overlaps; overlap++) {
        vector best = before[overlap];
        marks branch = {0};
        for (int high = 1; high < branches; high++) {
            vector cost = before[high * overlaps + overlap];
            marks better = cost < best;
            best = either(better, cost, best);
            branch = (better & high) | (~better & branch);
        }
        for (int lane = 0; lane < LANES; lane++) from[overlap * LANES + lane] = (uint8_t)branch[lane];
        for (int low = 0; low < branches; low++) {
            int state = (overlap << bits) + low;
            vector off = weight - codebook[state];
            after[state] = best + off * off;
        }
    }
}

static void start(vector *costs, vector weight, const float *codebook, const int32_t *overlap, int bits,
                  int state_bits) {
    for (int state = 0; state < 1 << state_bits; state++)
        for (int lane = 0; lane < LANES; lane++) {
            float off = weight[lane] - codebook[state];
            int allowed = overlap[lane] < 0 || state >> bits == overlap[lane];
            costs[state][lane] = allowed ? off * off : FLT_MAX;
        }
}

static int cheapest(const vector *costs, int lane, int overlap, int bits, int state_bits) {
    const int overlaps = 1 << (state_bits - bits);
    int step = overlap < 0 ? 1 : overlaps, best = overlap < 0 ? 0 : overlap;
    for (int state = best; state < 1 << state_bits; state += step)
        if (costs[state][lane] < costs[best][lane]) best = state;
    return best;
}

void trellis_encode(const float *weights, const int32_t *overlaps, const float *codebook, int32_t *states,
                    long blocks, int length, int bits, int state_bits, void *scratch) {
    const int num_states = 1 << state_bits, num_overlaps = num_states >> bits;
    vector *now = scratch, *next = now + num_states;
    uint8_t *from = (uint8_t *)(next + num_states);
    for (long first = 0; first < blocks; first += LANES) {
        const int lanes = blocks - first < LANES ? (int)(blocks - first) : LANES;
        vector weight;
        int32_t overlap[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            /* Lanes without a block of their own repeat the last one. */
            long block = first + (lane < lanes ? lane : lanes - 1);
            weight[lane] = weights[block * length];
            overlap[lane] = overlaps[block];
        }
        start(now, weight, codebook, overlap, bits, state_bits);
        for (int t = 1; t < length; t++) {
            for (int lane = 0; lane < LANES; lane++) {
                long block = first + (lane < lanes ? lane : lanes - 1);
                weight[lane] = weights[block * length + t];
            }
            advance(now, next, from + (size_t)t * num_overlaps * LANES, weight, codebook, bits, state_bits);
            vector *swap = now;
            now = next;
            next = swap;
        }
        for (int lane = 0; lane < lanes; lane++) {
            int state = cheapest(now, lane, overlap[lane], bits, state_bits);
            for (int t = length - 1; t > 0; t--) {
                states[(first + lane) * length + t] = state;
                int before = state >> bits;
                state = from[((size_t)t * num_overlaps + before) * LANES + lane] * num_overlaps + before;
            }
            states[(first + lane) * length] = state;
        }
    }
}
