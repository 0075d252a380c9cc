/* Gives scipy-openblas32's functions, named scipy_*, the plain names that MLX's CPU backend looks for.
 *
 * Each name is one jump: arguments, stack and return value pass through untouched, so no signature
 * (nor the hidden string lengths of Fortran) needs repeating. The targets are found when this library
 * is loaded, among those the process has loaded before with RTLD_GLOBAL. */

#if defined(__x86_64__)
#define JUMP(target) "\tendbr64\n\tjmp *" target "@GOTPCREL(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(target) "\thint #34\n\tadrp x16, :got:" target "\n\tldr x16, [x16, #:got_lo12:" target "]\n\tbr x16\n"
#else
#error "mlxft's BLAS shim knows x86-64 and aarch64 only"
#endif

#define FORWARD(name)                                       \
  __asm__(".text\n\t.globl " #name "\n\t.p2align 4\n"       \
          "\t.type " #name ", %function\n" #name ":\n"      \
          JUMP("scipy_" #name)                              \
          "\t.size " #name ", . - " #name "\n");

/* What libmlx.so imports: nm -D --undefined-only libmlx.so | grep -E 'cblas_|_$' */
FORWARD(cblas_sgemm)
FORWARD(cblas_dgemm)
FORWARD(cblas_cgemm)
FORWARD(sgeev_)
FORWARD(dgeev_)
FORWARD(cgeev_)
FORWARD(sgeqrf_)
FORWARD(dgeqrf_)
FORWARD(sgesdd_)
FORWARD(dgesdd_)
FORWARD(cgesdd_)
FORWARD(sgetrf_)
FORWARD(dgetrf_)
FORWARD(sgetri_)
FORWARD(dgetri_)
FORWARD(sorgqr_)
FORWARD(dorgqr_)
FORWARD(spotrf_)
FORWARD(dpotrf_)
FORWARD(ssyevd_)
FORWARD(dsyevd_)
FORWARD(cheevd_)
FORWARD(strtri_)
FORWARD(dtrtri_)
