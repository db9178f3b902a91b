//! The functions of the installed library.
//!
//! Types are those of `cublasLt.h`. They are not taken from a crate: the existing one does not look
//! for `libcublasLt.so.13`, and ends the process if it finds nothing.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// File names of cuBLASLt, newest version first.
const LIBRARY_NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

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
    FUNCTIONS.get_or_init(load).as_ref()
}

fn load() -> Option<Functions> {
    // SAFETY: when loaded, cuBLASLt only initializes its own memory.
    let opened =
        LIBRARY_NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
    let library: &'static libloading::Library = Box::leak(Box::new(opened?));
    // SAFETY: the function types match cublasLt.h.
    unsafe {
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
