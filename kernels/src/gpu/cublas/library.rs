//! The functions of the installed library.
//!
//! Types are those of `cublasLt.h`. They are not taken from a crate: the existing one does not look
//! for `libcublasLt.so.13`, and ends the process if it finds nothing.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// File names of cuBLASLt, newest version first.
const LIBRARY_NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Function of the driver.
const GET_VERSION: &[u8] = b"cuDriverGetVersion";
/// CUDA's encoding of versions: 12080 is 12.8. A library needs a driver of its major version.
const VERSIONS_OF_MAJOR: usize = 1000;

pub(super) type Pointer = *mut c_void;

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Choice {
    pub(super) algorithm: Algorithm,
    workspace_bytes: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

pub(super) type SetAttribute = unsafe extern "C" fn(Pointer, c_int, *const c_void, usize) -> c_int;

/// cuBLASLt's functions.
pub(super) struct Functions {
    pub(super) create: unsafe extern "C" fn(*mut Pointer) -> c_int,
    pub(super) desc_create: unsafe extern "C" fn(*mut Pointer, c_int, c_int) -> c_int,
    pub(super) desc_set: SetAttribute,
    pub(super) layout_create: unsafe extern "C" fn(*mut Pointer, c_int, u64, u64, i64) -> c_int,
    pub(super) layout_set: SetAttribute,
    pub(super) preference_create: unsafe extern "C" fn(*mut Pointer) -> c_int,
    pub(super) preference_set: SetAttribute,
    pub(super) preference_destroy: unsafe extern "C" fn(Pointer) -> c_int,
    pub(super) choose: unsafe extern "C" fn(
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        c_int,
        *mut Choice,
        *mut c_int,
    ) -> c_int,
    pub(super) multiply: unsafe extern "C" fn(
        Pointer,
        Pointer,
        *const f32,
        *const c_void,
        Pointer,
        *const c_void,
        Pointer,
        *const f32,
        *const c_void,
        Pointer,
        Pointer,
        Pointer,
        *const Algorithm,
        Pointer,
        usize,
        Pointer,
    ) -> c_int,
}

/// The loaded library. It stays loaded until the process ends.
pub(super) fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| load(driver_version()?)).as_ref()
}

/// Loads the newest library that works with a version of the driver.
pub(super) fn load(driver_version: usize) -> Option<Functions> {
    LIBRARY_NAMES.iter().find_map(|name| {
        // SAFETY: when loaded, cuBLASLt only initializes its own memory.
        let library = unsafe { libloading::Library::new(*name) }.ok()?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: the function types match cublasLt.h.
        unsafe {
            let runtime: unsafe extern "C" fn() -> usize =
                look_up(library, "cublasLtGetCudartVersion")?;
            if runtime() / VERSIONS_OF_MAJOR > driver_version / VERSIONS_OF_MAJOR {
                return None;
            }
            Some(Functions {
                create: look_up(library, "cublasLtCreate")?,
                desc_create: look_up(library, "cublasLtMatmulDescCreate")?,
                desc_set: look_up(library, "cublasLtMatmulDescSetAttribute")?,
                layout_create: look_up(library, "cublasLtMatrixLayoutCreate")?,
                layout_set: look_up(library, "cublasLtMatrixLayoutSetAttribute")?,
                preference_create: look_up(library, "cublasLtMatmulPreferenceCreate")?,
                preference_set: look_up(library, "cublasLtMatmulPreferenceSetAttribute")?,
                preference_destroy: look_up(library, "cublasLtMatmulPreferenceDestroy")?,
                choose: look_up(library, "cublasLtMatmulAlgoGetHeuristic")?,
                multiply: look_up(library, "cublasLtMatmul")?,
            })
        }
    })
}

/// Returns the newest version of CUDA that the driver supports, in CUDA's encoding. `None` without
/// a driver.
fn driver_version() -> Option<usize> {
    // SAFETY: the function only writes the version, and its type matches cuda.h.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").ok()?;
        let get_version = driver.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(GET_VERSION);
        let mut version = 0;
        let code = get_version.ok()?(&raw mut version);
        usize::try_from(version).ok().filter(|_| code == 0)
    }
}

/// Looks up a function of the library.
///
/// # Safety
///
/// `F` must be the type of the function.
unsafe fn look_up<F: Copy>(library: &'static libloading::Library, name: &str) -> Option<F> {
    // SAFETY: guaranteed by the caller.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|function| *function)
}
