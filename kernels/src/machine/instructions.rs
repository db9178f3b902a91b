//! Instruction sets, and the rules of matrix products for each.

use std::sync::OnceLock;

use crate::switch::{Switch, switch};

/// Instruction set of matrix products and other loops. All of them give equal bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// All processors that the crate is compiled for.
    Baseline,
    /// AVX2 and FMA: vectors of 8 values.
    Avx2,
    /// AVX-512 (F, BW, DQ and VL): vectors of 16 values.
    Avx512,
    /// AVX-512, with larger tiles and more copies of operands. Faster on processors of Intel.
    Avx512Intel,
}

impl Instructions {
    /// Returns the fastest supported set that `STOKER_KERNELS` permits.
    pub(crate) fn current() -> Self {
        static CURRENT: OnceLock<Instructions> = OnceLock::new();
        *CURRENT.get_or_init(|| match switch() {
            Switch::On if Self::Avx512.is_supported() && is_intel() => Self::Avx512Intel,
            Switch::On if Self::Avx512.is_supported() => Self::Avx512,
            _ if Self::Avx2.is_supported() => Self::Avx2,
            _ => Self::Baseline,
        })
    }

    /// Returns all supported sets, from the slowest.
    #[cfg(test)]
    pub(crate) fn supported() -> impl Iterator<Item = Self> {
        let all = [Self::Baseline, Self::Avx2, Self::Avx512, Self::Avx512Intel];
        all.into_iter().filter(|set| set.is_supported())
    }

    /// Returns `true` if the processor has the instructions.
    pub(crate) fn is_supported(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Intel => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Intel => false,
        }
    }

    /// Returns the number of values in a vector.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Baseline | Self::Avx2 => 8,
            Self::Avx512 | Self::Avx512Intel => 16,
        }
    }

    /// Returns the numbers of rows that a tile may have, from the largest. The last is 1. Tiles of
    /// windows may also have 9 rows.
    pub(crate) fn tile_rows(self) -> &'static [usize] {
        match self {
            Self::Baseline => &[4, 2, 1],
            Self::Avx2 => &[6, 4, 2, 1],
            Self::Avx512 => &[8, 4, 2, 1],
            Self::Avx512Intel => &[12, 8, 4, 2, 1],
        }
    }

    /// Returns the number of panels of a right operand that are copied side by side, so that
    /// processors prefetch the next lines of a row.
    pub(crate) fn panels_side_by_side(self) -> usize {
        match self {
            Self::Baseline | Self::Avx2 | Self::Avx512 => 4,
            Self::Avx512Intel => 16,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

/// Maximum of [`Instructions::lanes`].
pub(crate) const LANES_MAX: usize = 16;

/// Returns `true` if the processor computes `a * b + c` in one instruction, as all products do.
/// Otherwise burn's operators are faster.
pub(crate) fn has_fma() -> bool {
    !cfg!(target_arch = "x86_64") || Instructions::Avx2.is_supported()
}
