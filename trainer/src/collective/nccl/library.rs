//! The few functions of NCCL that are used, from the library that this machine has.
//!
//! Types and numbers are those of `nccl.h`, which NVIDIA keeps from version to version. They are not taken from a crate:
//! that which has them looks for no `libnccl.so.2`, which is what NCCL's packages install, and ends the process where it
//! finds nothing.

// Reason: functions of a C library, which take addresses on a device.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};

/// Where NCCL is looked for: as its packages install it, and as its developers' do.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first version whose calls need not block: 2.14.
const VERSION_MIN: c_int = 21_400;
/// Bytes of the id by which ranks find each other.
pub(super) const ID_BYTES: usize = 128;
/// How long the end of a communicator in order may take.
const END_MAX: Duration = Duration::from_secs(10);
/// How often it is looked whether something is done before the processor is given away.
const SPINS: u32 = 2_000;
const PAUSE: Duration = Duration::from_micros(50);

const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
const OP_SUM: c_int = 0;

/// What went wrong.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) why: String,
    /// Whether it was another rank's.
    pub(super) is_remote: bool,
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self { why, is_remote: false }
    }
}

type Outcome<T> = Result<T, Failure>;

/// What is summed; the numbers are NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Element {
    F16 = 6,
    F32 = 7,
    Bf16 = 9,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; ID_BYTES]);

/// What version 2.14 has of it: later ones take `size` and `version` to know.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

type Comm = *mut c_void;

/// NCCL's functions.
struct Functions {
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int, *mut Config) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
}

/// NCCL as it was found. It stays loaded until the process ends: threads of its own may run in it.
#[derive(Clone, Copy)]
pub(super) struct Library {
    functions: &'static Functions,
    version: c_int,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Library {
    /// The library of this machine.
    ///
    /// # Errors
    ///
    /// There is none, or it is too old.
    pub(super) fn open() -> Result<Self, String> {
        // SAFETY: NCCL does nothing when it is loaded but set up its own memory.
        let opened = NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
        let names = NAMES.join(" nor ");
        let missing = format!(
            "neither {names} is found: install NCCL, or name its folder in LD_LIBRARY_PATH"
        );
        let library: &'static _ = Box::leak(Box::new(opened.ok_or(missing)?));
        // SAFETY: the types are those of nccl.h.
        unsafe {
            let get_version: unsafe extern "C" fn(*mut c_int) -> c_int =
                find(library, "ncclGetVersion")?;
            let mut version = 0;
            if get_version(&raw mut version) != SUCCESS || version < VERSION_MIN {
                return Err(format!(
                    "NCCL is of version {version}, but must be of {VERSION_MIN} or later"
                ));
            }
            let functions = Functions {
                get_unique_id: find(library, "ncclGetUniqueId")?,
                init: find(library, "ncclCommInitRankConfig")?,
                all_reduce: find(library, "ncclAllReduce")?,
                async_error: find(library, "ncclCommGetAsyncError")?,
                finalize: find(library, "ncclCommFinalize")?,
                destroy: find(library, "ncclCommDestroy")?,
                abort: find(library, "ncclCommAbort")?,
                error_string: find(library, "ncclGetErrorString")?,
                last_error: find(library, "ncclGetLastError")?,
            };
            Ok(Self { functions: Box::leak(Box::new(functions)), version })
        }
    }

    /// As NCCL counts: 22703 is 2.27.3.
    pub(super) fn version(&self) -> i32 {
        self.version
    }

    /// An id by which ranks find each other.
    ///
    /// # Errors
    ///
    /// NCCL finds no network.
    pub(super) fn new_id(&self) -> Outcome<[u8; ID_BYTES]> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: `id` is as large as NCCL's.
        let code = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        self.checked(code, std::ptr::null_mut()).map(|()| id.0)
    }

    /// What a call answered.
    fn checked(&self, code: c_int, comm: Comm) -> Outcome<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |it: *const c_char| {
            if it.is_null() {
                return String::new();
            }
            // SAFETY: NCCL's texts end with a zero and live as long as the library.
            unsafe { CStr::from_ptr(it) }.to_string_lossy().into_owned()
        };
        // SAFETY: any code will do, and NCCL takes none for `comm`.
        let (what, last) = unsafe {
            (text((self.functions.error_string)(code)), text((self.functions.last_error)(comm)))
        };
        let why = if last.is_empty() { what } else { format!("{what}: {last}") };
        Err(Failure { why, is_remote: code == REMOTE_ERROR })
    }
}

/// A function of the library.
///
/// # Safety
///
/// `F` is its type.
unsafe fn find<F: Copy>(library: &'static libloading::Library, name: &str) -> Result<F, String> {
    // SAFETY: as the caller says.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|it| *it).map_err(|error| format!("NCCL has no {name}: {error}"))
}

/// Whether to go on waiting: the reason, if not.
type GoesOn<'a> = &'a dyn Fn() -> Outcome<()>;

/// A queue of this process on its GPU, in the context that burn uses: addresses are the same in it.
#[derive(Clone, Debug)]
pub(super) struct Queue(Arc<CudaStream>);

impl Queue {
    /// One of its own.
    ///
    /// # Errors
    ///
    /// The GPU cannot be used.
    pub(super) fn new(gpu: usize) -> Outcome<Self> {
        let driver = |error: DriverError| Failure::from(format!("GPU {gpu}: {error}"));
        let context = CudaContext::new(gpu).map_err(driver)?;
        Ok(Self(context.new_stream().map_err(driver)?))
    }

    /// NCCL's calls are about the context that the thread has.
    fn bind(&self) -> Outcome<()> {
        self.0.context().bind_to_thread().map_err(|error| error.to_string().into())
    }
}

/// One rank of several in NCCL. Its calls do not block, so that a rank that is gone is noticed.
pub(super) struct Communicator {
    library: Library,
    comm: Comm,
    queue: Queue,
    /// Whether nobody waits for its end in order.
    is_lost: bool,
}

// SAFETY: NCCL allows calls from any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { library, is_lost, .. } = self;
        f.debug_struct("Communicator")
            .field("library", library)
            .field("is_lost", is_lost)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// Waits until all ranks have joined. NCCL itself would wait for ever: `goes_on` says for how long.
    ///
    /// # Errors
    ///
    /// One of them cannot, or `goes_on` says no.
    pub(super) fn join(
        library: Library,
        id: [u8; ID_BYTES],
        rank: usize,
        size: usize,
        queue: Queue,
        goes_on: GoesOn<'_>,
    ) -> Outcome<Self> {
        queue.bind()?;
        let mut joined = Self { library, comm: std::ptr::null_mut(), queue, is_lost: false };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN as u32,
            blocking: 0,
        };
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: all that is pointed to lives until the call returns.
        let code = unsafe {
            (library.functions.init)(&raw mut joined.comm, size, Id(id), rank, &raw mut config)
        };
        let whole = library.checked(code, joined.comm).and_then(|()| joined.settle(goes_on));
        joined.noted(whole)?;
        Ok(joined)
    }

    /// Sums `num` elements at the address `from` of the GPU over all ranks to the address `to`; the sums are there when
    /// this returns. Nobody else may use either meanwhile.
    ///
    /// # Errors
    ///
    /// A rank is gone, or the GPU failed.
    pub(super) fn sum(
        &mut self,
        from: u64,
        to: u64,
        num: usize,
        element: Element,
        goes_on: GoesOn<'_>,
    ) -> Outcome<()> {
        if num == 0 {
            return Ok(());
        }
        self.queue.bind()?;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        let stream = self.queue.0.cu_stream().cast();
        // SAFETY: the caller holds the tensors at these addresses, of this many elements, and nothing writes them.
        let code = unsafe {
            let all_reduce = self.library.functions.all_reduce;
            all_reduce(from, to, num, element as c_int, OP_SUM, self.comm, stream)
        };
        let queued = self.library.checked(code, self.comm).and_then(|()| self.settle(goes_on));
        self.noted(queued)?;
        let driver = |error: DriverError| Failure::from(error.to_string());
        let done = self.queue.0.record_event(None).map_err(driver);
        let done =
            done.and_then(|event| self.wait(goes_on, &|| event.try_is_complete().map_err(driver)));
        self.noted(done)
    }

    /// The gang is over: the end is not in order, and waits for nobody.
    pub(super) fn abandon(&mut self) {
        self.is_lost = true;
    }

    /// Waits until NCCL has taken in what it was asked for.
    fn settle(&self, goes_on: GoesOn<'_>) -> Outcome<()> {
        self.wait(goes_on, &|| Ok(self.state()? == SUCCESS))
    }

    /// Waits for something while NCCL is well.
    fn wait(&self, goes_on: GoesOn<'_>, is_done: &dyn Fn() -> Outcome<bool>) -> Outcome<()> {
        for turn in 0_u32.. {
            if is_done()? {
                break;
            }
            if turn < SPINS {
                std::hint::spin_loop();
                continue;
            }
            self.state()?;
            goes_on()?;
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// What NCCL says of itself: errors of its own threads and of other ranks too.
    fn state(&self) -> Outcome<c_int> {
        let mut state = SUCCESS;
        // SAFETY: `comm` is open.
        let code = unsafe { (self.library.functions.async_error)(self.comm, &raw mut state) };
        self.library.checked(code, self.comm)?;
        self.library.checked(state, self.comm)?;
        Ok(state)
    }

    fn noted<T>(&mut self, outcome: Outcome<T>) -> Outcome<T> {
        self.is_lost |= outcome.is_err();
        outcome
    }

    fn end(&mut self) -> Outcome<()> {
        self.queue.bind()?;
        // SAFETY: `comm` is open, and nothing is asked of it after this.
        let code = unsafe { (self.library.functions.finalize)(self.comm) };
        self.library.checked(code, self.comm)?;
        let start = Instant::now();
        self.settle(&|| match start.elapsed() < END_MAX {
            true => Ok(()),
            false => Err("the others take too long".to_owned().into()),
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.comm.is_null() {
            return;
        }
        let is_over = !self.is_lost && self.end().is_ok();
        let Functions { destroy, abort, .. } = self.library.functions;
        // SAFETY: `comm` is open; aborting ends what hangs in it.
        unsafe { if is_over { destroy(self.comm) } else { abort(self.comm) } };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without NCCL this says how to get it; with it, but without a GPU, ids can be made.
    #[test]
    fn a_machine_with_or_without_nccl_is_told_apart() {
        match Library::open() {
            Err(why) => assert!(why.contains("libnccl.so.2") || why.contains("version"), "{why}"),
            Ok(library) => {
                assert!(library.version() >= VERSION_MIN);
                assert_ne!(library.new_id().unwrap(), [0; ID_BYTES]);
                let refused = library.checked(4, std::ptr::null_mut()).unwrap_err();
                assert!(refused.why.contains("invalid argument"), "{refused:?}");
                assert!(!refused.is_remote);
                assert!(library.checked(REMOTE_ERROR, std::ptr::null_mut()).unwrap_err().is_remote);
            }
        }
    }
}
