//! Matrix products by cuBLASLt, which is loaded if it is installed.

// Reason: functions of a C library, which take device addresses.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::DType;

use super::product::Layout;
use super::stream::Stream;

mod library;

use library::{Algorithm, Choice, Functions, Pointer, SetAttribute, functions};

/// Memory for sums of parts of a product, the size that NVIDIA recommends for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// Largest alignment that cuBLASLt distinguishes, in bytes.
const ALIGNMENT_MAX: u64 = 256;

const SUCCESS: c_int = 0;
const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_FAST_TF32: c_int = 77;
const TYPE_F32: c_int = 0;
const TYPE_F16: c_int = 2;
const TYPE_BF16: c_int = 14;
const DESC_TRANSPOSE_A: c_int = 3;
const DESC_TRANSPOSE_B: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const TRANSPOSED: c_int = 1;
const EPILOGUE_BIAS: c_int = 4;
/// Sums of the first operand over the depth of the product, written to the address of the bias.
const EPILOGUE_SUMS: c_int = 256;
const LAYOUT_BATCH: c_int = 5;
const LAYOUT_DISTANCE: c_int = 6;
const PREFERENCE_WORKSPACE: c_int = 1;
/// Alignments of `A`, `B`, `C` and `D`.
const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// Returns whether cuBLAS can be loaded: `libcublasLt.so.13`, `libcublasLt.so.12` or
/// `libcublasLt.so`. Without it, operators on NVIDIA GPUs call burn's own products.
pub fn is_installed() -> bool {
    functions().is_some()
}

/// What is computed together with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    Nothing,
    /// Adds a bias to each row.
    Bias,
    /// Also returns the sum of each column of `b`.
    ColumnSums,
}

/// Products of matrices, except for their addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) a: Layout,
    pub(super) b: Layout,
    pub(super) output: Layout,
    pub(super) dtype: DType,
    pub(super) scale: f32,
    pub(super) epilogue: Epilogue,
}

/// Queues a product on a stream. The output is not transposed. `written` is the output, the
/// workspace and the column sums, `read` is `a`, `b` and the bias, if the product has these.
///
/// # Errors
///
/// Fails if cuBLASLt does.
pub(super) fn multiply(
    product: &Product,
    stream: Stream,
    written: &[u64],
    read: &[u64],
) -> Result<(), String> {
    with_gpu(stream.gpu, |gpu| gpu.multiply(product, stream, written, read))
}

/// Returns whether cuBLASLt has an algorithm for a product whose buffers start at these offsets:
/// `b`, `a` and the output. Requires a current CUDA context.
pub(super) fn has_algorithm(product: &Product, offsets: [u64; 3], gpu: u16) -> bool {
    let [b, a, output] = offsets.map(alignment);
    let key = Key::new(product, [b, a, output, output]);
    with_gpu(gpu, |gpu| gpu.plan_of(&key)).is_ok()
}

/// Calls a function with cuBLASLt on a GPU. Requires a current CUDA context.
fn with_gpu<T>(index: u16, call: impl FnOnce(&mut Gpu) -> Result<T, String>) -> Result<T, String> {
    type Gpus = HashMap<u16, Arc<Mutex<Option<Gpu>>>>;
    static GPUS: Mutex<Option<Gpus>> = Mutex::new(None);
    // One lock for each GPU, so that its thread never waits for another GPU.
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = gpus.get_or_insert_default().entry(index).or_default().clone();
    drop(gpus);
    let mut gpu = gpu.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = match &mut *gpu {
        Some(gpu) => gpu,
        none => none.insert(Gpu::new()?),
    };
    call(gpu)
}

/// cuBLASLt on one GPU, and the algorithms that it chose.
struct Gpu {
    functions: &'static Functions,
    handle: Pointer,
    plans: HashMap<Key, Plan>,
}

// SAFETY: cuBLASLt allows the use of a handle from any thread. Descriptions are used by one thread
// at a time, because `Gpu` is behind a lock.
unsafe impl Send for Gpu {}

/// Properties on which the choice of an algorithm depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    a: Layout,
    b: Layout,
    output: Layout,
    dtype: DType,
    epilogue: Epilogue,
    /// Of `b`, `a`, the output and the output, in bytes.
    alignments: [u64; 4],
}

impl Key {
    fn new(product: &Product, alignments: [u64; 4]) -> Self {
        let Product { a, b, output, dtype, epilogue, .. } = *product;
        Self { a, b, output, dtype, epilogue, alignments }
    }
}

/// Descriptions of a product, which live until the process ends.
#[derive(Clone, Copy)]
struct Plan {
    desc: Pointer,
    first: Pointer,
    second: Pointer,
    output: Pointer,
    algorithm: Algorithm,
}

impl Gpu {
    /// Requires a current CUDA context.
    fn new() -> Result<Self, String> {
        let functions = functions().ok_or("cuBLAS is not installed")?;
        let mut handle = null_mut();
        // SAFETY: `handle` is valid until the call returns.
        checked("cublasLtCreate", unsafe { (functions.create)(&raw mut handle) })?;
        Ok(Self { functions, handle, plans: HashMap::new() })
    }

    fn multiply(
        &mut self,
        product: &Product,
        stream: Stream,
        written: &[u64],
        read: &[u64],
    ) -> Result<(), String> {
        let ([output, workspace, sums @ ..], [a, b, bias @ ..]) = (written, read) else {
            return Err("a product has two outputs and at least two inputs".into());
        };
        let key = Key::new(product, [b, a, output, output].map(|address| alignment(*address)));
        let plan = self.plan_of(&key)?;
        let Functions { desc_set, multiply, .. } = *self.functions;
        let (alpha, beta) = (product.scale, 0.0_f32);
        let pointer = |address: &u64| *address as Pointer;
        // SAFETY: the caller holds the buffers until the stream has used them, and their sizes fit
        // the layouts. Descriptions stay valid.
        unsafe {
            if let Some(address) = sums.first().or(bias.first()) {
                set(desc_set, plan.desc, DESC_BIAS_POINTER, address)?;
            }
            let code = multiply(
                self.handle,
                plan.desc,
                &raw const alpha,
                pointer(b),
                plan.first,
                pointer(a),
                plan.second,
                &raw const beta,
                pointer(output),
                plan.output,
                pointer(output),
                plan.output,
                &raw const plan.algorithm,
                pointer(workspace),
                WORKSPACE_BYTES,
                stream.address,
            );
            checked("cublasLtMatmul", code).map_err(|why| format!("{why} for {key:?}"))
        }
    }

    fn plan_of(&mut self, key: &Key) -> Result<Plan, String> {
        if let Some(plan) = self.plans.get(key) {
            return Ok(*plan);
        }
        let plan = self.plan(key)?;
        self.plans.insert(*key, plan);
        Ok(plan)
    }

    /// Describes a product and lets cuBLASLt choose its algorithm.
    ///
    /// cuBLASLt stores matrices by columns. The same memory read by rows is the transpose, so this
    /// describes `output^T = b^T * a^T`.
    fn plan(&self, key: &Key) -> Result<Plan, String> {
        let Functions { desc_create, desc_set, layout_create, layout_set, .. } = *self.functions;
        let (data, compute) = match key.dtype {
            DType::F16 => (TYPE_F16, COMPUTE_32F),
            DType::BF16 => (TYPE_BF16, COMPUTE_32F),
            _ => (TYPE_F32, COMPUTE_32F_FAST_TF32),
        };
        let [mut desc, mut first, mut second, mut output] = [null_mut(); 4];
        let batch = key.a.batch;
        // SAFETY: pointers to local values are valid until the calls return.
        unsafe {
            let code = desc_create(&raw mut desc, compute, TYPE_F32);
            checked("cublasLtMatmulDescCreate", code)?;
            for (layout, attribute) in [(key.b, DESC_TRANSPOSE_A), (key.a, DESC_TRANSPOSE_B)] {
                if layout.is_transposed {
                    set(desc_set, desc, attribute, &TRANSPOSED)?;
                }
            }
            let epilogue = match key.epilogue {
                Epilogue::Nothing => None,
                Epilogue::Bias => Some(EPILOGUE_BIAS),
                Epilogue::ColumnSums => Some(EPILOGUE_SUMS),
            };
            if let Some(epilogue) = epilogue {
                set(desc_set, desc, DESC_EPILOGUE, &epilogue)?;
            }
            let layouts = [(key.b, &mut first), (key.a, &mut second), (key.output, &mut output)];
            for (layout, pointer) in layouts {
                let (rows, columns) = match layout.is_transposed {
                    true => (layout.rows, layout.columns),
                    false => (layout.columns, layout.rows),
                };
                let (rows, columns) = (rows as u64, columns as u64);
                let leading = layout.leading as i64;
                let code = layout_create(pointer, data, rows, columns, leading);
                checked("cublasLtMatrixLayoutCreate", code)?;
                if batch > 1 {
                    set(layout_set, *pointer, LAYOUT_BATCH, &(batch as i32))?;
                    set(layout_set, *pointer, LAYOUT_DISTANCE, &(layout.distance as i64))?;
                }
            }
        }
        let algorithm = self.choose(key, [desc, first, second, output])?;
        Ok(Plan { desc, first, second, output, algorithm })
    }

    fn choose(&self, key: &Key, of: [Pointer; 4]) -> Result<Algorithm, String> {
        let Functions { preference_create, preference_set, preference_destroy, choose, .. } =
            *self.functions;
        let [desc, first, second, output] = of;
        let (mut preference, mut choice, mut num) = (null_mut(), Choice::default(), 0);
        // SAFETY: pointers to local values are valid until the calls return, and descriptions are
        // valid.
        let code = unsafe {
            let code = preference_create(&raw mut preference);
            checked("cublasLtMatmulPreferenceCreate", code)?;
            set(preference_set, preference, PREFERENCE_WORKSPACE, &WORKSPACE_BYTES)?;
            for (attribute, alignment) in PREFERENCE_ALIGNMENTS.into_iter().zip(key.alignments) {
                set(preference_set, preference, attribute, &(alignment as u32))?;
            }
            let handle = self.handle;
            let code = choose(
                handle,
                desc,
                first,
                second,
                output,
                output,
                preference,
                1,
                &raw mut choice,
                &raw mut num,
            );
            preference_destroy(preference);
            code
        };
        let function = "cublasLtMatmulAlgoGetHeuristic";
        let remedy = "set STOKER_KERNELS=off to use burn's products";
        checked(function, code).map_err(|why| format!("{why} for {key:?}; {remedy}"))?;
        if num == 0 || choice.state != SUCCESS {
            return Err(format!("cuBLAS has no algorithm for {key:?}; {remedy}"));
        }
        Ok(choice.algorithm)
    }
}

/// Returns the alignment of an address in bytes.
fn alignment(address: u64) -> u64 {
    (1 << address.trailing_zeros().min(63)).min(ALIGNMENT_MAX)
}

/// Sets an attribute of a description.
///
/// # Safety
///
/// `of` is a valid description for `function`, and the attribute has type `T`.
unsafe fn set<T>(
    function: SetAttribute,
    of: Pointer,
    attribute: c_int,
    value: &T,
) -> Result<(), String> {
    // SAFETY: guaranteed by the caller.
    let code = unsafe { function(of, attribute, (&raw const *value).cast(), size_of::<T>()) };
    checked("cublasLt...SetAttribute", code)
}

fn checked(function: &str, code: c_int) -> Result<(), String> {
    match code {
        SUCCESS => Ok(()),
        _ => Err(format!("{function} failed with status {code} (cublasStatus_t)")),
    }
}

#[cfg(test)]
mod tests {
    use stoker_test_cluster::record_skip;

    use super::library::load;

    use super::*;

    /// The library accepts descriptions also without a GPU.
    #[test]
    fn descriptions_have_the_form_of_the_library() {
        let Some(functions) = load(usize::MAX) else {
            record_skip("needs cuBLAS (libcublasLt)");
            return;
        };
        let functions = Box::leak(Box::new(functions));
        assert!(load(11_080).is_none(), "a library for a newer driver was loaded");
        let gpu = Gpu { functions, handle: null_mut(), plans: HashMap::new() };
        let layout = |rows, columns, is_transposed| {
            let leading = if is_transposed { rows } else { columns };
            Layout { rows, columns, is_transposed, leading, batch: 3, distance: rows * columns }
        };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for is_transposed in [false, true] {
                let (a, b) = (layout(5, 7, is_transposed), layout(7, 9, !is_transposed));
                let (output, alignments) = (layout(5, 9, false), [16; 4]);
                let epilogue = if is_transposed { Epilogue::Bias } else { Epilogue::ColumnSums };
                let key = Key { a, b, output, dtype, epilogue, alignments };
                // Choosing an algorithm needs a GPU, and is the last step.
                let why = gpu.plan(&key).err().unwrap();
                assert!(why.starts_with("cublasLtMatmulAlgoGetHeuristic"), "{why}");
            }
        }
    }

    #[test]
    fn alignments_have_a_limit() {
        let addresses = [1, 2, 12, 256, 4096, 0x7000_0000_0100, 0];
        assert_eq!(addresses.map(alignment), [1, 2, 4, 256, 256, 256, 256]);
    }
}
