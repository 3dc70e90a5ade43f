// A picture opens as large as it was drawn: a narrow page shows all of it, but small.
const dialog = document.createElement("dialog")
dialog.className = "enlarged"
dialog.setAttribute("aria-label", "The picture, enlarged")
dialog.innerHTML = '<button type="button">Close</button><div tabindex="0"></div>'
dialog.addEventListener("click", () => dialog.close())
document.body.append(dialog)

document.addEventListener("click", event => {
  const link = event.target.closest("a.picture")
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return
  event.preventDefault()
  const shown = link.querySelector("img")
  const large = shown.cloneNode()
  large.style.width = `${shown.naturalWidth / 2}px` // pictures have two dots for each that they are wide
  const view = dialog.querySelector("div")
  view.replaceChildren(large)
  dialog.showModal()
  view.scrollLeft = (event.offsetX / shown.width) * view.scrollWidth - view.clientWidth / 2 // to what was tapped
})
