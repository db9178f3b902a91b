//! Arrays in memory as data.

use std::collections::BTreeMap;

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Int, Tensor};

use super::{At, Source};
use crate::Result;

/// Arrays in memory whose first dimension is the samples: a tensor, or tuples, lists and named maps
/// of them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an array of samples",
    note = "use a burn tensor, or a tuple, `Vec` or `BTreeMap<String, _>` of tensors"
)]
pub trait Rows: Send + Sync {
    /// The same shape of things, with one batch in it.
    type Batch;

    /// Whether some of it are inputs and others are not, by what they are: not so where names or places in a list tell.
    const HAS_INPUTS: bool = true;

    /// Adds the number of rows of every leaf, each under its path, which begins with `path`.
    fn lengths(&self, path: &str, out: &mut Vec<(String, usize)>);

    /// The given rows, on `device`. What is of floating point is cast to `dtype`, if there is one; of a tuple, the first
    /// alone, which are the inputs.
    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch;
}

impl<const D: usize, K: Basic> Rows for Tensor<D, K>
where
    Self: Send + Sync,
{
    type Batch = Self;

    fn lengths(&self, path: &str, out: &mut Vec<(String, usize)>) {
        out.push((path.into(), self.dims()[0]));
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self {
        let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
        let rows = Tensor::<1, Int>::from_data(rows.as_slice(), &self.device());
        let rows = self.clone().select(0, rows);
        match dtype.filter(|dtype| rows.dtype().is_float() && rows.dtype() != *dtype) {
            // On the host: arrays are there as a rule, and half the bytes go to the device.
            Some(dtype) => Self::from_data(rows.into_data(), (device, dtype)),
            None => rows.to_device(device),
        }
    }
}

macro_rules! tuple_rows {
    ($($field:ident $index:tt),*) => {
        impl<$($field: Rows),*> Rows for ($($field,)*) {
            type Batch = ($($field::Batch,)*);

            fn lengths(&self, path: &str, out: &mut Vec<(String, usize)>) {
                $(self.$index.lengths(&format!("{path}.{}", $index), out);)*
            }

            fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
                ($(self.$index.rows(rows, device, dtype.filter(|_| $index == 0)),)*)
            }
        }
    };
}
tuple_rows!(A 0, B 1);
tuple_rows!(A 0, B 1, C 2);
tuple_rows!(A 0, B 1, C 2, D 3);

impl<R: Rows> Rows for Vec<R> {
    type Batch = Vec<R::Batch>;

    const HAS_INPUTS: bool = false;

    fn lengths(&self, path: &str, out: &mut Vec<(String, usize)>) {
        for (index, field) in self.iter().enumerate() {
            field.lengths(&format!("{path}.{index}"), out);
        }
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
        self.iter().map(|field| field.rows(rows, device, dtype)).collect()
    }
}

impl<R: Rows> Rows for BTreeMap<String, R> {
    type Batch = BTreeMap<String, R::Batch>;

    const HAS_INPUTS: bool = false;

    fn lengths(&self, path: &str, out: &mut Vec<(String, usize)>) {
        for (name, field) in self {
            field.lengths(&format!("{path}.{name}"), out);
        }
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
        let batch = |(name, field): (&String, &R)| (name.clone(), field.rows(rows, device, dtype));
        self.iter().map(batch).collect()
    }
}

/// Arrays whose lengths agree.
pub(super) struct Arrays<R> {
    rows: R,
    samples: usize,
}

impl<R: Rows> Arrays<R> {
    pub(super) fn new(rows: R) -> Result<Self> {
        let mut lengths = vec![];
        rows.lengths("data", &mut lengths);
        let (first, samples) = lengths.first().cloned().ok_or("the data has no fields")?;
        if samples == 0 {
            return Err(format!("{first} has no samples").into());
        }
        match lengths.iter().find(|(_, other)| *other != samples) {
            Some((path, other)) => {
                Err(format!("{path} has {other} samples, but {first} has {samples}").into())
            }
            None => Ok(Self { rows, samples }),
        }
    }
}

impl<R: Rows> Source<R::Batch> for Arrays<R> {
    fn samples(&self) -> usize {
        self.samples
    }

    fn batch(&self, samples: &[usize], at: &At) -> Result<R::Batch> {
        // Arrays in double precision stay so, unless another precision is asked for.
        let dtype = Some(at.dtype).filter(|it| R::HAS_INPUTS && *it != DType::F32);
        Ok(self.rows.rows(samples, at.device, dtype))
    }
}
