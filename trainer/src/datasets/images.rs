//! Images in memory, and batches of them.

use std::fmt;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::{DataError, idx};
use crate::rng::mix_seed;
use crate::{BatchContext, Result, Source};

/// Labeled images of one size, as bytes in memory; a [`Source`] of batches.
///
/// A batch is `(images, labels)`. Images are a `Tensor<4>`, `[samples, channels, height, width]`,
/// or a `Tensor<2>`, `[samples, channels * height * width]`. Labels are a `Tensor<1, Int>`. Pixels
/// are divided by 255, then normalized if [`normalized`](Self::normalized) was called.
///
/// # Examples
///
/// ```
/// use stoker_trainer::datasets::Images;
///
/// let two_images_of_one_pixel = Images::new(vec![0, 255], vec![7, 9], [1, 1, 1])?;
/// assert_eq!(two_images_of_one_pixel.len(), 2);
/// # Ok::<(), stoker_trainer::datasets::DataError>(())
/// ```
#[derive(Clone)]
pub struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    shape: [usize; 3],
    /// Lookup table from byte to value, for each channel.
    values: Vec<[f32; 256]>,
    augment: Option<Augment>,
}

/// Random augmentation of each image, different in each epoch. It depends only on
/// [`BatchContext::sample_seed`], and therefore not on the number of ranks or workers. For training
/// only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Augment {
    /// Mirrors horizontally with probability 1/2.
    pub flip: bool,
    /// Shifts by up to this many pixels in each direction and fills with black.
    pub shift: usize,
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Images")
            .field("len", &self.len())
            .field("shape", &self.shape)
            .field("augment", &self.augment)
            .finish_non_exhaustive()
    }
}

impl Images {
    /// Creates images from pixel bytes and labels.
    ///
    /// # Shapes
    ///
    /// - pixels: `[samples, channels, height, width]`, the last dimension varies fastest
    /// - labels: `[samples]`
    /// - shape: channels, height and width
    ///
    /// # Errors
    ///
    /// Fails without images, or if the number of labels differs from the number of images.
    pub fn new(
        pixels: Vec<u8>,
        labels: Vec<u8>,
        shape: [usize; 3],
    ) -> std::result::Result<Self, DataError> {
        let mismatch = |expected: String, found: String| {
            let subject = format!("images of {shape:?} (channels, height, width)");
            DataError::Mismatch { subject, expected, found }
        };
        let size = shape.iter().product::<usize>();
        if size == 0 || pixels.is_empty() {
            return Err(mismatch("at least one image".into(), "none".into()));
        }
        if !pixels.len().is_multiple_of(size) {
            let found = format!("{} bytes", pixels.len());
            return Err(mismatch(format!("a multiple of {size} bytes"), found));
        }
        let len = pixels.len() / size;
        if labels.len() != len {
            let found = format!("{} labels", labels.len());
            return Err(mismatch(format!("{len} labels, one for each image"), found));
        }
        let values = vec![table(0.0, 1.0); shape[0]];
        Ok(Self { pixels, labels, shape, values, augment: None })
    }

    /// Reads grayscale images and labels from two idx files, as used by MNIST.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read or is corrupt, or if the files differ in their number of
    /// samples.
    pub fn idx(
        images: impl AsRef<Path>,
        labels: impl AsRef<Path>,
    ) -> std::result::Result<Self, DataError> {
        let (images, labels) = (images.as_ref(), labels.as_ref());
        let pixels = idx::read(images, 3)?;
        let classes = idx::read(labels, 1)?;
        if pixels.shape[0] != classes.shape[0] {
            return Err(DataError::Mismatch {
                subject: format!("{} and {}", images.display(), labels.display()),
                expected: format!("{} labels, one for each image", pixels.shape[0]),
                found: format!("{} labels", classes.shape[0]),
            });
        }
        Self::new(pixels.values, classes.values, [1, pixels.shape[1], pixels.shape[2]])
    }

    /// Normalizes pixels: after the division by 255, subtracts `mean` and divides by `std`, with
    /// one number for each channel.
    ///
    /// # Errors
    ///
    /// Fails if the number of values is not the number of channels, a value is not finite, or a
    /// `std` is not positive.
    pub fn normalized(mut self, mean: &[f32], std: &[f32]) -> std::result::Result<Self, DataError> {
        let is_finite = mean.iter().chain(std).all(|value| value.is_finite());
        let channels = self.shape[0];
        let fits = mean.len() == channels && std.len() == channels;
        if !fits || !is_finite || std.iter().any(|std| *std <= 0.0) {
            return Err(DataError::Mismatch {
                subject: "mean and standard deviation of the pixels".into(),
                expected: format!("{channels} finite numbers each, and positive deviations"),
                found: format!("{mean:?} and {std:?}"),
            });
        }
        self.values = mean.iter().zip(std).map(|(mean, std)| table(*mean, *std)).collect();
        Ok(self)
    }

    /// Augments each image of a batch randomly; see [`Augment`].
    #[must_use]
    pub fn augmented(self, augment: Augment) -> Self {
        Self { augment: Some(augment), ..self }
    }

    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns `false`: there is always at least one image.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns channels, height and width.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Returns the label of each image.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// Returns the values of a batch, image by image.
    fn gather(&self, samples: &[usize], context: &BatchContext) -> Vec<f32> {
        let size = self.shape.iter().product::<usize>();
        let mut out = Vec::with_capacity(samples.len() * size);
        for &sample in samples {
            let image = &self.pixels[sample * size..][..size];
            match self.augment {
                None => self.copy(image, &mut out),
                Some(augment) => {
                    let transform = augment.sample_transform(context.sample_seed(sample));
                    self.transform(image, transform, &mut out);
                }
            }
        }
        out
    }

    fn copy(&self, image: &[u8], out: &mut Vec<f32>) {
        let plane = self.shape[1] * self.shape[2];
        for (pixels, values) in image.chunks_exact(plane).zip(&self.values) {
            out.extend(pixels.iter().map(|pixel| values[usize::from(*pixel)]));
        }
    }

    fn transform(&self, image: &[u8], transform: Transform, out: &mut Vec<f32>) {
        let [_, height, width] = self.shape;
        for (pixels, values) in image.chunks_exact(height * width).zip(&self.values) {
            for y in 0..height {
                let row = y.checked_add_signed(transform.down).filter(|y| *y < height);
                for x in 0..width {
                    let x = if transform.flip { width - 1 - x } else { x };
                    let column = x.checked_add_signed(transform.right).filter(|x| *x < width);
                    let pixel = row.zip(column).map_or(0, |(y, x)| pixels[y * width + x]);
                    out.push(values[usize::from(pixel)]);
                }
            }
        }
    }

    fn classes(&self, samples: &[usize], device: &Device) -> Tensor<1, Int> {
        let labels: Vec<i64> =
            samples.iter().map(|sample| i64::from(self.labels[*sample])).collect();
        Tensor::from_data(TensorData::new(labels, [samples.len()]), device)
    }
}

impl Source<(Tensor<4>, Tensor<1, Int>)> for Images {
    fn samples(&self) -> usize {
        self.len()
    }

    fn batch(
        &self,
        samples: &[usize],
        context: &BatchContext,
    ) -> Result<(Tensor<4>, Tensor<1, Int>)> {
        let [channels, height, width] = self.shape;
        let shape = [samples.len(), channels, height, width];
        let images = TensorData::new(self.gather(samples, context), shape);
        let images = Tensor::from_data(images, (context.device, context.dtype));
        Ok((images, self.classes(samples, context.device)))
    }
}

impl Source<(Tensor<2>, Tensor<1, Int>)> for Images {
    fn samples(&self) -> usize {
        self.len()
    }

    fn batch(
        &self,
        samples: &[usize],
        context: &BatchContext,
    ) -> Result<(Tensor<2>, Tensor<1, Int>)> {
        let shape = [samples.len(), self.shape.iter().product()];
        let images = TensorData::new(self.gather(samples, context), shape);
        let images = Tensor::from_data(images, (context.device, context.dtype));
        Ok((images, self.classes(samples, context.device)))
    }
}

/// Flip and shift of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transform {
    flip: bool,
    down: isize,
    right: isize,
}

impl Augment {
    fn sample_transform(self, seed: u64) -> Transform {
        // Independent samples, with a separate key each. The modulo bias over 64 bits is
        // negligible.
        let shift = |purpose: u64| {
            let sampled = mix_seed(&[seed, purpose]) % (2 * self.shift as u64 + 1);
            sampled as isize - self.shift as isize
        };
        Transform {
            flip: self.flip && mix_seed(&[seed, 0]) & 1 == 1,
            down: shift(1),
            right: shift(2),
        }
    }
}

/// Returns the lookup table from byte to value.
fn table(mean: f32, std: f32) -> [f32; 256] {
    std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std)
}

#[cfg(test)]
mod tests;
