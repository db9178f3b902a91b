//! Settings of the system's memory allocator. This is the only unsafe code for them: see
//! `docs/decisions/0053-system-allocator.md`.

#![cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "no crate calls mallopt safely")
)]

/// Size from which glibc puts a block into a separate mapping, and unmaps it when it is freed.
/// glibc before 2.35 accepts no larger one.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES_MIN: i32 = 32 << 20;
/// Never return free memory at the end of the heap to the kernel.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const NEVER: i32 = -1;

/// Makes glibc keep memory that the program frees, for the next step. Call this at the start of a
/// program. Does nothing with another C library, or if the environment configures the allocator.
/// Rust code of a program with another global allocator is not affected.
pub(crate) fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if !is_configured(std::env::vars_os().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    })) {
        // SAFETY: mallopt takes two numbers by value. It holds the lock of the main arena while it
        // merges that arena's free blocks and stores the number. Other threads may read or store
        // these numbers without this lock while they allocate or free. This relies on glibc: each
        // number is an aligned word, and any of its values is valid, so at worst a thread still
        // uses the old one, or glibc's own adjustment replaces the new one.
        unsafe {
            // Either call also ends glibc's adjustment of both numbers, so do not make only one.
            if libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN) == 1 {
                libc::mallopt(libc::M_TRIM_THRESHOLD, NEVER);
            }
        }
    }
}

/// Returns whether one of these environment variables configures glibc's allocator.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn is_configured(mut variables: impl Iterator<Item = (String, String)>) -> bool {
    variables.any(|(name, value)| {
        name.starts_with("MALLOC_") || name == "GLIBC_TUNABLES" && value.contains("glibc.malloc.")
    })
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_user_are_kept() {
        let check = |name: &str, value: &str, expected| {
            let variables = [("HOME", "/root"), (name, value)];
            let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(is_configured(variables.into_iter()), expected, "{name}={value}");
        };
        check("MALLOC_TRIM_THRESHOLD_", "131072", true);
        check("MALLOC_ARENA_MAX", "2", true);
        check("GLIBC_TUNABLES", "glibc.malloc.perturb=0", true);
        check("GLIBC_TUNABLES", "glibc.rtld.nns=4", false);
        check("MY_MALLOC_LIMIT", "1", false);
    }
}
